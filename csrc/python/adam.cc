#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"
#include "host/page_source.h"
#include "optim/adam.h"
#include "optim/convert.h"
#include "parallel/tbb_executor.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace castor {
namespace {

Executor& shared_executor() {
  static TbbExecutor executor;
  return executor;
}

ScalarType scalar_type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return ScalarType::kFloat32;
    case at::kBFloat16: return ScalarType::kBFloat16;
    case at::kHalf: return ScalarType::kFloat16;
    default:
      throw InvalidArgument(std::string("HybridAdam updates float32, bfloat16 and float16 "
                                        "parameters, not ") +
                            toString(tensor.scalar_type()));
  }
}

/// One parameter of a standalone HybridAdam: tensors of equal numel and layout, all on the CPU.
/// `master` is the parameter itself when that is fp32.
struct AdamTensors {
  at::Tensor param, grad, master, exp_avg, exp_avg_sq;
  AdamOptions options;
  std::int64_t step;
};

AdamTensors tensors_of(const py::dict& entry) {
  const auto tensor = [&entry](const char* name) { return entry[name].cast<at::Tensor>(); };
  return {.param = tensor("param"),
          .grad = tensor("grad"),
          .master = tensor("master"),
          .exp_avg = tensor("exp_avg"),
          .exp_avg_sq = tensor("exp_avg_sq"),
          .options = {.lr = entry["lr"].cast<double>(),
                      .beta1 = entry["beta1"].cast<double>(),
                      .beta2 = entry["beta2"].cast<double>(),
                      .eps = entry["eps"].cast<double>(),
                      .weight_decay = entry["weight_decay"].cast<double>(),
                      .mode = entry["decoupled"].cast<bool>() ? WeightDecayMode::kDecoupled
                                                              : WeightDecayMode::kL2},
          .step = entry["step"].cast<std::int64_t>()};
}

void adam_update_tensors(const std::vector<py::dict>& entries) {
  std::vector<AdamTensors> all;
  std::vector<AdamSegment> segments;
  for (const py::dict& entry : entries) {
    const AdamTensors& tensors = all.emplace_back(tensors_of(entry));
    const ScalarType type = scalar_type_of(tensors.param);
    if (tensors.grad.scalar_type() != tensors.param.scalar_type()) {
      throw InvalidArgument("HybridAdam needs a gradient of the parameter's type");
    }
    for (const at::Tensor* state :
         {&tensors.grad, &tensors.master, &tensors.exp_avg, &tensors.exp_avg_sq}) {
      if (state->strides() != tensors.param.strides() || state->sizes() != tensors.param.sizes() ||
          !state->device().is_cpu() || !state->is_non_overlapping_and_dense()) {
        throw InvalidArgument(
            "HybridAdam needs a dense CPU parameter with a gradient and state of its layout");
      }
    }
    segments.push_back(
        {.master = tensors.master.data_ptr<float>(),
         .exp_avg = tensors.exp_avg.data_ptr<float>(),
         .exp_avg_sq = tensors.exp_avg_sq.data_ptr<float>(),
         .grad = tensors.grad.const_data_ptr(),
         .param = type == ScalarType::kFloat32 ? nullptr : tensors.param.mutable_data_ptr(),
         .type = type,
         .numel = static_cast<std::size_t>(tensors.param.numel()),
         .coefficients = AdamCoefficients(tensors.options, tensors.step, 1.0)});
    tensors.param.unsafeGetTensorImpl()->bump_version();
  }
  const py::gil_scoped_release release;
  adam_update(shared_executor(), segments);
}

/// Makes `param` (16 bits) the rounding of `master`, as adam_update will expect it.
void round_to_param(const at::Tensor& param, const at::Tensor& master) {
  master_to_param(&shared_executor(), param.mutable_data_ptr(), master.data_ptr<float>(),
                  static_cast<std::size_t>(param.numel()), scalar_type_of(param));
}

/// A zeroed fp32 tensor of `like`'s shape and layout, on huge pages where the kernel has them: one
/// core updates 64Mi parameters in 33 ms on huge pages and in 38 ms on small ones.
at::Tensor zero_state_like(const at::Tensor& like) {
  at::Tensor state = at::zeros_like(like);  // not touched yet: large ones are fresh mappings
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
  module.def("zero_state_like", &zero_state_like, py::arg("like"));
  module.def("round_to_param", &round_to_param, py::arg("param"), py::arg("master"));
  module.def("adam_isa", [] { return std::string(adam_isa()); });
}

}  // namespace castor
