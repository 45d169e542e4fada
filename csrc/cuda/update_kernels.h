#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "optim/update_rule.h"

namespace castor::cuda {

/// Returns whether there are kernels for the rule of that name.
[[nodiscard]] bool has_kernels(std::string_view rule) noexcept;

/// Enqueues one step of each segment on `stream` and returns: UpdateRule::update() on the device,
/// with its bits. All arrays are readable and writable by the device of `stream`. Throws
/// InvalidArgument for a rule without kernels, and as the rule does; CudaError.
void update(const UpdateRule& rule, std::span<const UpdateSegment> segments, cudaStream_t stream);

}  // namespace castor::cuda
