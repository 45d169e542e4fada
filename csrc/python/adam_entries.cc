#include "python/adam_entries.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/error.h"
#include "python/names.h"
#include "python/state_tensors.h"

namespace py = pybind11;

namespace castor {
namespace {

void check_layout(const at::Tensor& param, std::initializer_list<const at::Tensor*> states,
                  c10::Device device) {
  for (const at::Tensor* state : states) {
    if (state->strides() != param.strides() || state->sizes() != param.sizes() ||
        state->device() != device || !state->is_non_overlapping_and_dense()) {
      throw InvalidArgument(
          "HybridAdam needs a dense parameter with a gradient and state of its layout, all on " +
          device.str());
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

}  // namespace

AdamOptions adam_options(const py::dict& group) {
  return {
      .lr = group["lr"].cast<double>(),
      .beta1 = group["beta1"].cast<double>(),
      .beta2 = group["beta2"].cast<double>(),
      .eps = group["eps"].cast<double>(),
      .weight_decay = group["weight_decay"].cast<double>(),
      .mode = group["decoupled"].cast<bool>() ? WeightDecayMode::kDecoupled : WeightDecayMode::kL2,
      .maximize = group["maximize"].cast<bool>()};
}

AdamEntries::Tensors AdamEntries::tensors_of(const py::dict& entry) {
  const auto tensor = [&entry](const char* name) { return entry[name].cast<at::Tensor>(); };
  return {.param = tensor("param"),
          .grad = tensor("grad"),
          .exp_avg = tensor("exp_avg"),
          .exp_avg_sq = tensor("exp_avg_sq"),
          .master = entry["master"].cast<std::optional<at::Tensor>>(),
          .options = adam_options(entry),
          .step = entry["step"].cast<std::int64_t>()};
}

AdamEntries::SplitTensors AdamEntries::split_tensors_of(const py::dict& entry, std::int64_t step) {
  return {.remainder = entry["remainder"].cast<at::Tensor>(),
          .scales = entry["scales"].cast<std::optional<at::Tensor>>(),
          .rounding = RoundingKey(entry["seed"].cast<std::uint64_t>(),
                                  entry["stream"].cast<std::uint64_t>(), step)};
}

AdamEntries::AdamEntries(const std::vector<py::dict>& entries, c10::Device device) {
  for (const py::dict& entry : entries)
    append(entry, device);
}

void AdamEntries::append(const py::dict& entry, c10::Device device) {
  const Tensors& tensors = tensors_.emplace_back(tensors_of(entry));
  const ScalarType type = scalar_type_of(tensors.param);
  const StateFormat format = entry["format"].cast<StateFormat>();
  if (tensors.grad.scalar_type() != tensors.param.scalar_type()) {
    throw InvalidArgument("HybridAdam needs a gradient of the parameter's type");
  }
  check_layout(tensors.param,
               {&tensors.param, &tensors.grad, &tensors.exp_avg, &tensors.exp_avg_sq}, device);
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
    check_layout(tensors.param, {&*tensors.master}, device);
    segment.master = tensors.master->data_ptr<float>();
  } else {
    const SplitTensors& split = splits_.emplace_back(split_tensors_of(entry, tensors.step));
    check_layout(tensors.param, {&split.remainder}, device);
    segment.remainder = split.remainder.data_ptr<std::int16_t>();
    segment.scales = scales_of(split.scales, format, segment.numel, device);
    segment.rounding = split.rounding;
  }
  segments_.push_back(segment);
  tensors.param.unsafeGetTensorImpl()->bump_version();
}

}  // namespace castor
