// _simulated_device: what tests/python gives a session in place of a GPU.
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "faulty_disk.h"
#include "python/backend_capsule.h"
#include "simulated_device.h"
#include "torch_allocations.h"

namespace py = pybind11;
using castor::CopyDirection;
using castor::testing::FaultyDisk;
using castor::testing::SimulatedDevice;

namespace {

/// While the session lives.
py::dict counts(const SimulatedDevice& device) {
  py::dict figures;
  figures["update_numel"] = device.counts().update_numel.load();
  figures["update_calls"] = device.counts().update_calls.load();
  figures["norm_numel"] = device.counts().norm_numel.load();
  figures["fences"] = device.counts().fences.load();
  figures["copies_in"] = device.copies()->num_copies(CopyDirection::kHostToDevice);
  figures["copies_out"] = device.copies()->num_copies(CopyDirection::kDeviceToHost);
  return figures;
}

py::dict fault_counts(const FaultyDisk& disk) {
  const castor::IoFaultCounts counts = disk.counts();
  return py::dict(py::arg("reads") = counts.reads, py::arg("writes") = counts.writes,
                  py::arg("faults") = counts.faults);
}

}  // namespace

PYBIND11_MODULE(_simulated_device, m) {
  py::class_<SimulatedDevice, std::shared_ptr<SimulatedDevice>>(m, "SimulatedDevice")
      .def(py::init<std::uint64_t>(), py::arg("bytes_per_second"))
      .def(
          "capsule",
          [](const std::shared_ptr<SimulatedDevice>& device) { return castor::capsule_of(device); })
      .def("counts", &counts)
      .def("refuse_block",
           [](SimulatedDevice& device, std::size_t n) { device.memory().refuse_block(n); });
  py::class_<FaultyDisk, std::shared_ptr<FaultyDisk>>(m, "FaultyDisk")
      .def(py::init<>())
      .def(
          "set",
          [](FaultyDisk& disk, const std::string& faults) {
            disk.set(castor::parse_io_faults(faults));
          },
          py::arg("faults"))
      .def("counts", &fault_counts)
      .def(
          "with_device",
          [](const std::shared_ptr<FaultyDisk>& disk, const py::capsule& device) {
            return castor::capsule_of(std::make_shared<castor::testing::DeviceWithFaultyDisk>(
                *device.get_pointer<std::shared_ptr<castor::DeviceBackend>>(), disk));
          },
          py::arg("device"));
  m.def("count_allocations", &castor::testing::count_allocations, py::arg("counted"));
  m.def("refuse_allocation", &castor::testing::refuse_allocation, py::arg("n"));
}
