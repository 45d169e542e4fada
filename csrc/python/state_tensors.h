#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <optional>

#include "core/scalar_type.h"
#include "optim/state_format.h"

namespace castor {

// Tensors of the state formats in the standalone HybridAdam. Internal to csrc/python.

/// Returns the type of the tensor. Throws InvalidArgument for one that Adam does not update.
[[nodiscard]] ScalarType scalar_type_of(const at::Tensor& tensor);

/// Returns the element type of exp_avg and exp_avg_sq.
[[nodiscard]] at::ScalarType moment_type(StateFormat format);

/// Returns the scales of a parameter of `numel` elements: a contiguous float32 tensor of shape
/// (blocks, 2) on `device` for split_int8, none otherwise. Throws InvalidArgument for anything
/// else.
[[nodiscard]] MomentScales* scales_of(const std::optional<at::Tensor>& scales, StateFormat format,
                                      std::size_t numel, c10::Device device);

}  // namespace castor
