#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/scalar_type.h"

namespace castor::cuda {

/// Enqueues on `stream`: the mean of `count` gradients, as castor::average() computes it, with its
/// bits. A NaN is a NaN of the device's. `mean` and `parts` are memory of the device; `mean` may be
/// `parts`, and overlaps nothing else. Takes no memory. Throws InvalidArgument for a type without
/// arithmetic; CudaError when a launch is refused.
void average(void* mean, const void* parts, std::size_t count, std::size_t numel, ScalarType type,
             cudaStream_t stream);

}  // namespace castor::cuda
