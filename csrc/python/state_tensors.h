#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <optional>

#include "core/scalar_type.h"
#include "optim/state_format.h"

namespace castor {

// How the standalone HybridAdam keeps a state format in tensors. Internal to csrc/python.

/// Throws InvalidArgument for a type that Adam does not update.
[[nodiscard]] ScalarType scalar_type_of(const at::Tensor& tensor);

/// Element type of exp_avg and exp_avg_sq.
[[nodiscard]] at::ScalarType moment_type(StateFormat format);

/// The scales of a parameter of `numel` elements: a contiguous float32 tensor of shape (blocks, 2)
/// on `device` for split_int8, none otherwise. Throws InvalidArgument for anything else.
[[nodiscard]] MomentScales* scales_of(const std::optional<at::Tensor>& scales, StateFormat format,
                                      std::size_t numel, c10::Device device);

}  // namespace castor
