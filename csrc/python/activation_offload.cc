#include "torch/activation_offload.h"

#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"

namespace py = pybind11;

namespace castor {

void bind_activation_offload(py::module_& module) {
  using Offload = ActivationOffload;
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<Offload::Pass, std::shared_ptr<Offload::Pass>>(module, "OffloadPass");
  py::class_<Offload::Saved, std::shared_ptr<Offload::Saved>>(module, "OffloadedTensor");
  py::class_<Offload, std::shared_ptr<Offload>>(module, "ActivationOffload")
      .def(py::init<const std::shared_ptr<Session>&>(), py::arg("session"))
      .def("begin", &Offload::begin, released)
      .def("save", &Offload::save, py::arg("forward"), py::arg("tensor"), released)
      .def("restore", &Offload::restore, py::arg("saved"), released)
      .def("figures", [](const Offload& self) {
        const ActivationStore::Figures figures = self.figures();
        return py::dict(py::arg("ready_host_bytes") = figures.ready_host_bytes,
                        py::arg("ready_nvme_bytes") = figures.ready_nvme_bytes,
                        py::arg("bytes_offloaded") = figures.bytes_offloaded);
      });
}

}  // namespace castor
