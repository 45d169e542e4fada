#pragma once

// torch's header of that name, as far as castor's sources use it, for the simulated GPU.

#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#pragma GCC visibility push(hidden)

namespace c10::cuda {

/// A stream of the simulated GPU; torch knows it by its number.
class CUDAStream {
 public:
  explicit CUDAStream(c10::Stream stream) : stream_(stream) {}

  [[nodiscard]] cudaStream_t stream() const {
    return reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(stream_.id()));
  }
  [[nodiscard]] c10::Stream unwrap() const { return stream_; }
  [[nodiscard]] StreamId id() const { return stream_.id(); }
  [[nodiscard]] DeviceIndex device_index() const { return stream_.device_index(); }
  [[nodiscard]] Device device() const { return stream_.device(); }
  bool operator==(const CUDAStream& other) const { return stream_ == other.stream_; }
  operator cudaStream_t() const { return stream(); }  // NOLINT: as torch's

 private:
  c10::Stream stream_;
};

/// Of the calling thread.
CUDAStream getCurrentCUDAStream(DeviceIndex device = -1);
CUDAStream getDefaultCUDAStream(DeviceIndex device = -1);
CUDAStream getStreamFromExternal(cudaStream_t stream, DeviceIndex device);
void setCurrentCUDAStream(CUDAStream stream);

}  // namespace c10::cuda

#pragma GCC visibility pop
