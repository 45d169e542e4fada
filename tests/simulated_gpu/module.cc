// _simulated_gpu: torch's side of the simulated GPU. The same file holds castor._cuda
// (csrc/python/cuda) compiled for it.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "device_memory.h"
#include "gpu.h"
#include "process_group.h"

namespace py = pybind11;
using namespace castor::simulated;

namespace {

py::dict memory_figures() {
  const DeviceMemory::Figures figures = device_memory().figures();
  py::dict result;
  result["allocated"] = figures.allocated;
  result["peak_allocated"] = figures.peak_allocated;
  result["reserved"] = figures.reserved;
  result["peak_reserved"] = figures.peak_reserved;
  result["capacity"] = device_memory().capacity();
  result["available"] = device_memory().available();
  return result;
}

py::dict count_figures() {
  py::dict figures;
  figures["update_numel"] = counts().update_numel.load();
  figures["update_calls"] = counts().update_calls.load();
  figures["norm_numel"] = counts().norm_numel.load();
  figures["norm_launches"] = counts().norm_launches.load();
  figures["copies_in"] = counts().copies_in.load();
  figures["copies_out"] = counts().copies_out.load();
  figures["bytes_in"] = counts().bytes_in.load();
  figures["bytes_out"] = counts().bytes_out.load();
  figures["fences"] = counts().fences.load();
  figures["host_waits"] = counts().host_waits.load();
  figures["collectives"] = counts().collectives.load();
  figures["registrations"] = counts().registrations.load();
  figures["collective_bytes"] = counts().collective_bytes.load();
  return figures;
}

/// Gloo's group, made through Python: torch ships no headers of gloo. The timeout is that of
/// connecting; operations have a day.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout) {
  const py::gil_scoped_acquire acquire;
  const py::object gloo =
      py::module_::import("torch.distributed").attr("ProcessGroupGloo")(store, rank, size, timeout);
  gloo.attr("_set_default_timeout")(std::chrono::milliseconds(std::chrono::hours(24)));
  return gloo.cast<c10::intrusive_ptr<c10d::Backend>>();
}

c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                             int size, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<SimulatedGroup>(store, rank, size, timeout, &make_gloo);
}

/// Holds a stream until the host opens it. After a minute it opens by itself: who should have done
/// so waits for the stream. Thread-safe.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    late_ = !changed_.wait_for(lock, std::chrono::minutes(1), [this] { return open_; });
  }

  /// Returns whether the stream was held until now.
  bool open() {
    const std::scoped_lock lock(mutex_);
    open_ = true;
    changed_.notify_all();
    return !late_;
  }

 private:
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  bool open_ = false;
  bool late_ = false;
};

}  // namespace

PYBIND11_MODULE(_simulated_gpu, m) {
  add_device_to_torch();
  add_operators_to_torch();
  const auto release = py::call_guard<py::gil_scoped_release>();
  m.def(
      "synchronize",
      [] {
        Gpu::instance().synchronize();
        check_device();
      },
      release);
  m.def(
      "close", [] { Gpu::instance().close(); }, release);
  m.def(
      "delay",
      [](std::uint64_t seed, std::int64_t longest, std::uint64_t one_in) {
        Gpu::instance().delay(
            {.seed = seed, .longest = std::chrono::microseconds(longest), .one_in = one_in});
      },
      py::arg("seed"), py::arg("longest_us") = 200, py::arg("one_in") = 8);
  m.def(
      "sleep",
      [](std::int64_t microseconds) {
        current_queue()->enqueue([microseconds] {
          std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        });
      },
      py::arg("microseconds"));
  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate").def("open", &Gate::open);
  m.def("hold", [] {
    auto gate = std::make_shared<Gate>();
    current_queue()->enqueue([gate] { gate->pass(); });
    return gate;
  });
  m.def("begin_capture", [] { Gpu::instance().capture(current_stream().id()); });
  m.def("end_capture", [] { Gpu::instance().capture(-1); });
  m.def("reset_error", [] { Gpu::instance().error().reset(); });
  m.def("memory", &memory_figures);
  m.def("reset_peaks", [] { device_memory().reset_peaks(); });
  m.def(
      "empty_cache", [] { device_memory().release_cached(); }, release);
  m.def(
      "limit", [](double fraction) { device_memory().limit(fraction); }, py::arg("fraction"));
  m.def(
      "limit_registered", [](std::size_t bytes) { Gpu::instance().limit_registered(bytes); },
      py::arg("bytes"));
  m.def("overwrite_when_reused",
        [] { device_memory().overwrite_at(DeviceMemory::Overwrite::kReuse); });
  m.def(
      "refuse_tensor",
      [](std::size_t n, std::size_t times) { refusals().tensors.refuse(n, times); }, py::arg("n"),
      py::arg("times") = 1);
  m.def(
      "refuse_block", [](std::size_t n) { refusals().blocks.refuse(n); }, py::arg("n"));
  m.def(
      "refuse_pages", [](std::size_t n, std::size_t times) { refusals().pages.refuse(n, times); },
      py::arg("n"), py::arg("times") = 1);
  m.def("refusals", [] { return refusals().tensors.count() + refusals().blocks.count(); });
  m.def("counts", &count_figures);
  m.def("make_group", &make_group, py::arg("store"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"));
}
