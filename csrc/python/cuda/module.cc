// castor._cuda: the backend of sessions on a GPU, and its parts by themselves for tests and
// benchmarks. A module of its own, so that castor._C needs no CUDA library. Signatures for type
// checkers: python/castor/_cuda.pyi.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/adam_kernel.h"
#include "cuda/cuda_error.h"
#include "cuda/norm_kernel.h"
#include "cuda/pinned_pages.h"
#include "cuda/stream_copy_engine.h"
#include "cuda/stream_order.h"
#include "host/mmap_arena.h"
#include "python/adam_entries.h"
#include "python/backend_capsule.h"
#include "python/state_tensors.h"
#include "torch/cuda/caching_arena.h"
#include "torch/cuda/cuda_backend.h"

namespace py = pybind11;

namespace castor {
namespace {

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    throw InvalidArgument("a copy needs contiguous tensors; one of shape " +
                          py::str(py::cast(tensor.sizes().vec())).cast<std::string>() + " is not");
  }
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

c10::DeviceIndex index_of(const at::Tensor& tensor) {
  if (!tensor.is_cuda())
    throw InvalidArgument("expected a CUDA tensor, got one on " + tensor.device().str());
  return tensor.device().index();
}

StreamId current_stream(c10::DeviceIndex device) {
  return cuda::stream_id(c10::cuda::getCurrentCUDAStream(device).stream());
}

std::uint64_t submit(cuda::StreamCopyEngine& engine, const at::Tensor& target,
                     const at::Tensor& source) {
  if (target.is_cuda() == source.is_cuda()) {
    throw InvalidArgument("a copy goes from host to device or back; both tensors are on " +
                          target.device().str());
  }
  const CopyRequest request{
      .source = bytes_of(source),
      .target = bytes_of(target),
      .direction = target.is_cuda() ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost,
      .behind = current_stream(index_of(target.is_cuda() ? target : source)),
      .await_source = {}};
  const py::gil_scoped_release release;
  return static_cast<std::uint64_t>(engine.submit(request));
}

void adam_update_tensors(const std::vector<py::dict>& entries) {
  if (entries.empty())
    return;
  const c10::DeviceIndex device = index_of(entries[0]["param"].cast<at::Tensor>());
  const AdamEntries adam(entries, c10::Device(c10::kCUDA, device));
  const c10::cuda::CUDAGuard guard(device);
  cuda::adam_update(adam.segments(), c10::cuda::getCurrentCUDAStream(device).stream());
}

/// One float64 for each tensor, on their device.
at::Tensor square_norm_tensors(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty())
    throw InvalidArgument("square_norms needs at least one tensor");
  const c10::DeviceIndex device = index_of(tensors[0]);
  std::vector<cuda::NormSegment> segments;
  for (const at::Tensor& tensor : tensors) {
    if (index_of(tensor) != device || !tensor.is_contiguous())
      throw InvalidArgument("square_norms needs contiguous tensors on one device");
    segments.push_back({.data = tensor.const_data_ptr(),
                        .numel = static_cast<std::size_t>(tensor.numel()),
                        .type = scalar_type_of(tensor)});
  }
  const c10::cuda::CUDAGuard guard(device);
  const auto options = at::TensorOptions().dtype(at::kDouble).device(at::kCUDA, device);
  const auto count = static_cast<std::int64_t>(cuda::norm_workspace_doubles(segments));
  const at::Tensor workspace = at::empty({count}, options);
  at::Tensor sums = at::empty({static_cast<std::int64_t>(segments.size())}, options);
  cuda::square_norms(segments, sums.data_ptr<double>(), workspace.data_ptr<double>(),
                     c10::cuda::getCurrentCUDAStream(device).stream());
  return sums;
}

/// A uint8 tensor over a block of an arena, which lives as long as the tensor.
at::Tensor block_tensor(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                        c10::Device device) {
  std::byte* const data = arena->allocate(bytes);
  const auto give_back = [arena, data, bytes](void*) { arena->deallocate(data, bytes); };
  return at::from_blob(data, {static_cast<std::int64_t>(bytes)}, give_back,
                       at::TensorOptions().dtype(at::kByte).device(device), device);
}

/// Host memory registered with CUDA.
class PinnedArena {
 public:
  explicit PinnedArena(int device) {
    auto pages = std::make_unique<cuda::PinnedPages>(std::make_unique<OsPages>(), device);
    pages_ = pages.get();
    arena_ = std::make_shared<MmapArena>(std::move(pages));
  }
  [[nodiscard]] at::Tensor empty(std::size_t bytes) const {
    return block_tensor(arena_, bytes, c10::Device(c10::kCPU));
  }
  [[nodiscard]] std::size_t registered_bytes() const { return pages_->registered_bytes(); }
  [[nodiscard]] std::string description() const { return arena_->description(); }

 private:
  const cuda::PinnedPages* pages_ = nullptr;  // owned by arena_
  std::shared_ptr<MmapArena> arena_;
};

class DeviceArena {
 public:
  explicit DeviceArena(int device)
      : device_(static_cast<c10::DeviceIndex>(device)),
        arena_(std::make_shared<CachingArena>(device_)) {}
  [[nodiscard]] at::Tensor empty(std::size_t bytes) const {
    return block_tensor(arena_, bytes, c10::Device(c10::kCUDA, device_));
  }
  [[nodiscard]] std::string description() const { return arena_->description(); }
  [[nodiscard]] py::dict statistics() const {
    const CachedBytes cached = cached_bytes(device_);
    py::dict figures;
    figures["allocated"] = cached.allocated;
    figures["peak_allocated"] = cached.peak_allocated;
    figures["reserved"] = cached.reserved;
    return figures;
  }

 private:
  const c10::DeviceIndex device_;
  const std::shared_ptr<CachingArena> arena_;
};

/// The classes of castor.errors: this module has its own copy of the C++ ones, not of theirs.
void translate(std::exception_ptr pending) {
  const auto class_of = [](const char* name) {
    return py::module_::import("castor.errors").attr(name);
  };
  try {
    if (pending)
      std::rethrow_exception(std::move(pending));
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const OutOfMemory& error) {
    const py::object raised = class_of("OutOfMemoryError")(error.what());
    // Its constructor takes the figures of castor._C's last one.
    raised.attr("tier") = std::string(to_string(error.tier()));
    raised.attr("requested") = error.requested();
    raised.attr("available") = error.available();
    raised.attr("budget") = error.budget();
    PyErr_SetObject(py::type::of(raised).ptr(), raised.ptr());
  } catch (const Error& error) {
    PyErr_SetString(class_of("Error").ptr(), error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  py::register_local_exception_translator(&translate);
  const auto release = py::call_guard<py::gil_scoped_release>();
  // Of this module alone: the simulated GPU of the tests is a second one of the same sources.
  py::class_<cuda::StreamCopyEngine>(module, "CopyEngine", py::module_local())
      .def(py::init([](int device) { return std::make_unique<cuda::StreamCopyEngine>(device); }),
           py::arg("device"))
      .def("submit", &submit, py::arg("target"), py::arg("source"))
      .def(
          "wait",
          [](cuda::StreamCopyEngine& engine, std::uint64_t ticket) {
            engine.wait(CopyTicket{ticket});
          },
          py::arg("ticket"), release)
      .def(
          "order",
          [](cuda::StreamCopyEngine& engine, std::uint64_t ticket) {
            engine.order(CopyTicket{ticket},
                         current_stream(static_cast<c10::DeviceIndex>(engine.device())));
          },
          py::arg("ticket"), release)
      .def(
          "done",
          [](cuda::StreamCopyEngine& engine, std::uint64_t ticket) {
            return engine.done(CopyTicket{ticket});
          },
          py::arg("ticket"), release)
      .def(
          "release",
          [](cuda::StreamCopyEngine& engine, const at::Tensor& slot) {
            const std::span<std::byte> bytes = bytes_of(slot);
            const auto stream = current_stream(index_of(slot));
            const py::gil_scoped_release released;
            engine.release(bytes, stream);
          },
          py::arg("slot"))
      .def(
          "forget",
          [](cuda::StreamCopyEngine& engine, const at::Tensor& slot) {
            const std::span<std::byte> bytes = bytes_of(slot);
            const py::gil_scoped_release released;
            engine.forget(bytes);
          },
          py::arg("slot"));
  py::class_<PinnedArena>(module, "PinnedArena", py::module_local())
      .def(py::init<int>(), py::arg("device"))
      .def("empty", &PinnedArena::empty, py::arg("num_bytes"))
      .def_property_readonly("registered_bytes", &PinnedArena::registered_bytes)
      .def_property_readonly("description", &PinnedArena::description);
  py::class_<DeviceArena>(module, "DeviceArena", py::module_local())
      .def(py::init<int>(), py::arg("device"))
      .def("empty", &DeviceArena::empty, py::arg("num_bytes"))
      .def("statistics", &DeviceArena::statistics)
      .def_property_readonly("description", &DeviceArena::description);
  module.def(
      "make_backend",
      [](int device) {
        return capsule_of(make_cuda_backend(static_cast<c10::DeviceIndex>(device)));
      },
      py::arg("device"));
  module.def("adam_update", &adam_update_tensors, py::arg("entries"));
  module.def("square_norms", &square_norm_tensors, py::arg("tensors"));
  module.def("runtime_version", &cuda::runtime_version);
}

}  // namespace castor
