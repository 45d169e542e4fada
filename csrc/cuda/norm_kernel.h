#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

#include "optim/gradient.h"

namespace castor::cuda {

using castor::NormSegment;  // in memory that the device can read

/// Returns the number of doubles of workspace that square_norms() needs for these segments.
[[nodiscard]] std::size_t norm_workspace_doubles(std::span<const NormSegment> segments) noexcept;

/// Enqueues on `stream`: sums[i] = sum of squares of segments[i], in double; 0 for no elements. The
/// bits are those of copy_and_square_norm() on the CPU, whose order of additions it follows. Two
/// launches for 143 segments. `sums`
/// (one double a segment) and `workspace` are memory of the device, which nobody else touches until
/// the work is done.
/// Throws InvalidArgument for a segment with elements and no data, or of a type without arithmetic;
/// CudaError when a launch is refused.
void square_norms(std::span<const NormSegment> segments, double* sums, double* workspace,
                  cudaStream_t stream);

}  // namespace castor::cuda
