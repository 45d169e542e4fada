#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "host/page_source.h"
#include "optim/adam.h"
#include "optim/convert.h"
#include "python/adam_entries.h"
#include "python/bindings.h"
#include "python/state_formats.h"
#include "python/state_tensors.h"

namespace py = pybind11;

namespace castor {
namespace {

void adam_update_tensors(const std::vector<py::dict>& entries) {
  const AdamEntries adam(entries, at::kCPU);
  const py::gil_scoped_release release;
  adam_update(shared_executor(), adam.segments());
}

/// Makes `param` (16 bits) the rounding of `master`, as adam_update will expect it.
void round_to_param(const at::Tensor& param, const at::Tensor& master) {
  master_to_param(&shared_executor(), param.mutable_data_ptr(), master.data_ptr<float>(),
                  static_cast<std::size_t>(param.numel()), scalar_type_of(param));
}

/// A zeroed tensor of type `dtype` and `like`'s shape and layout, on huge pages where the kernel
/// has them: one core updates 64Mi parameters in 33 ms on huge pages and in 38 ms on small ones.
at::Tensor zero_state_like(const at::Tensor& like, at::ScalarType dtype) {
  at::Tensor state = at::zeros_like(like, dtype);  // not touched yet: large ones are fresh mappings
  const std::size_t page = system_page_sizes().page;
  const auto address = reinterpret_cast<std::uintptr_t>(state.mutable_data_ptr());
  const std::uintptr_t begin = (address + page - 1) / page * page;
  const std::uintptr_t end = (address + state.nbytes()) / page * page;
  if (begin < end) {
    static OsPages pages;
    pages.advise_huge(reinterpret_cast<std::byte*>(begin), end - begin, end - begin);
  }
  return state;
}

}  // namespace

void bind_adam(py::module_& module) {
  module.def("adam_update", &adam_update_tensors, py::arg("entries"));
  module.def("zero_state_like", &zero_state_like, py::arg("like"), py::arg("dtype"));
  module.def(
      "storage_uses", [](const at::Tensor& tensor) { return tensor.storage().use_count(); },
      py::arg("tensor"));
  module.def("round_to_param", &round_to_param, py::arg("param"), py::arg("master"));
  module.def("adam_isa", [] { return std::string(adam_isa()); });
}

}  // namespace castor
