#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "host/page_source.h"
#include "optim/adam.h"
#include "optim/convert.h"
#include "python/bindings.h"
#include "python/state_formats.h"

namespace py = pybind11;

namespace castor {
namespace {

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
/// `master` is the parameter itself when that is fp32, and absent in the split formats.
struct AdamTensors {
  at::Tensor param, grad, exp_avg, exp_avg_sq;
  std::optional<at::Tensor> master;
  AdamOptions options;
  std::int64_t step;
};

AdamTensors tensors_of(const py::dict& entry) {
  const auto tensor = [&entry](const char* name) { return entry[name].cast<at::Tensor>(); };
  return {.param = tensor("param"),
          .grad = tensor("grad"),
          .exp_avg = tensor("exp_avg"),
          .exp_avg_sq = tensor("exp_avg_sq"),
          .master = entry["master"].cast<std::optional<at::Tensor>>(),
          .options = {.lr = entry["lr"].cast<double>(),
                      .beta1 = entry["beta1"].cast<double>(),
                      .beta2 = entry["beta2"].cast<double>(),
                      .eps = entry["eps"].cast<double>(),
                      .weight_decay = entry["weight_decay"].cast<double>(),
                      .mode = entry["decoupled"].cast<bool>() ? WeightDecayMode::kDecoupled
                                                              : WeightDecayMode::kL2},
          .step = entry["step"].cast<std::int64_t>()};
}

/// The state of an entry whose format is not fp32, besides the moments.
struct SplitTensors {
  at::Tensor remainder;
  std::optional<at::Tensor> scales;
  RoundingKey rounding;
};

SplitTensors split_tensors_of(const py::dict& entry, std::int64_t step) {
  return {.remainder = entry["remainder"].cast<at::Tensor>(),
          .scales = entry["scales"].cast<std::optional<at::Tensor>>(),
          .rounding = RoundingKey(entry["seed"].cast<std::uint64_t>(),
                                  entry["stream"].cast<std::uint64_t>(), step)};
}

void check_layout(const at::Tensor& param, std::initializer_list<const at::Tensor*> states) {
  for (const at::Tensor* state : states) {
    if (state->strides() != param.strides() || state->sizes() != param.sizes() ||
        !state->device().is_cpu() || !state->is_non_overlapping_and_dense()) {
      throw InvalidArgument(
          "HybridAdam needs a dense CPU parameter with a gradient and state of its layout");
    }
  }
}

void check_type(const at::Tensor& state, at::ScalarType type, const char* name) {
  if (state.scalar_type() != type) {
    throw InvalidArgument(std::string("HybridAdam's ") + name + " is " +
                          toString(state.scalar_type()) + "; this state format needs " +
                          toString(type));
  }
}

void adam_update_tensors(const std::vector<py::dict>& entries) {
  std::deque<AdamTensors> all;  // of which the segments hold pointers
  std::deque<SplitTensors> splits;
  std::vector<AdamSegment> segments;
  for (const py::dict& entry : entries) {
    const AdamTensors& tensors = all.emplace_back(tensors_of(entry));
    const ScalarType type = scalar_type_of(tensors.param);
    const StateFormat format = state_format_of(entry["format"].cast<std::string>());
    if (tensors.grad.scalar_type() != tensors.param.scalar_type()) {
      throw InvalidArgument("HybridAdam needs a gradient of the parameter's type");
    }
    check_layout(tensors.param, {&tensors.grad, &tensors.exp_avg, &tensors.exp_avg_sq});
    check_type(tensors.exp_avg, moment_type(format), "exp_avg");
    check_type(tensors.exp_avg_sq, moment_type(format), "exp_avg_sq");
    AdamSegment segment{
        .exp_avg = tensors.exp_avg.mutable_data_ptr(),
        .exp_avg_sq = tensors.exp_avg_sq.mutable_data_ptr(),
        .grad = tensors.grad.const_data_ptr(),
        .param = type == ScalarType::kFloat32 ? nullptr : tensors.param.mutable_data_ptr(),
        .type = type,
        .numel = static_cast<std::size_t>(tensors.param.numel()),
        .coefficients = AdamCoefficients(tensors.options, tensors.step, 1.0),
        .format = format};
    if (format == StateFormat::kFp32) {
      check_layout(tensors.param, {&*tensors.master});
      segment.master = tensors.master->data_ptr<float>();
    } else {
      const SplitTensors& split = splits.emplace_back(split_tensors_of(entry, tensors.step));
      check_layout(tensors.param, {&split.remainder});
      segment.remainder = split.remainder.data_ptr<std::int16_t>();
      segment.scales = scales_of(split.scales, format, segment.numel);
      segment.rounding = split.rounding;
    }
    segments.push_back(segment);
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
  module.def("round_to_param", &round_to_param, py::arg("param"), py::arg("master"));
  module.def("adam_isa", [] { return std::string(adam_isa()); });
}

}  // namespace castor
