#include "python/state_tensors.h"

#include "core/error.h"

namespace castor {

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

at::ScalarType moment_type(StateFormat format) {
  switch (state_bytes(format).exp_avg) {
    case 1: return at::kByte;
    case 2: return at::kBFloat16;
    default: return at::kFloat;
  }
}

MomentScales* scales_of(const std::optional<at::Tensor>& scales, StateFormat format,
                        std::size_t numel, c10::Device device) {
  if (format != StateFormat::kSplitInt8) {
    if (scales.has_value())
      throw InvalidArgument("format " + std::string(to_string(format)) + " has no scales");
    return nullptr;
  }
  const auto num_blocks = static_cast<std::int64_t>(num_moment_blocks(numel));
  if (!scales.has_value() || scales->scalar_type() != at::kFloat || scales->device() != device ||
      !scales->is_contiguous() || scales->sizes() != at::IntArrayRef({num_blocks, 2})) {
    throw InvalidArgument("format split_int8 needs contiguous float32 scales on " + device.str() +
                          " of shape (" + std::to_string(num_blocks) + ", 2) for " +
                          std::to_string(numel) + " elements");
  }
  return reinterpret_cast<MomentScales*>(scales->mutable_data_ptr());
}

}  // namespace castor
