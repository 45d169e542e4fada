#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>

#include "core/compute_stream.h"

namespace castor::cuda {

/// Converts a CUDA stream to its name in core; handle_of() converts back. The legacy default stream
/// is 0.
[[nodiscard]] inline StreamId stream_id(cudaStream_t stream) noexcept {
  return StreamId{std::bit_cast<std::uintptr_t>(stream)};
}
[[nodiscard]] inline cudaStream_t handle_of(StreamId stream) noexcept {
  return std::bit_cast<cudaStream_t>(static_cast<std::uintptr_t>(stream));
}

/// Makes what `then` is given from now on wait for what `first` has been given. Both streams belong
/// to `device`. No effect where they are one. Throws CudaError.
void order_streams(int device, StreamId first, StreamId then);

}  // namespace castor::cuda
