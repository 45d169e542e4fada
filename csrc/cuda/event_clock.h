#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/device_clock.h"
#include "cuda/event_pool.h"

namespace castor::cuda {

/// Clock of a GPU: its marks are CUDA events. Events whose times are known go back to a pool while
/// marks are made, so that the pool holds about as many as the device is behind the host. Streams
/// are named by cuda::stream_id and belong to the device. Throws CudaError. Not thread-safe.
class EventClock final : public DeviceClock {
 public:
  explicit EventClock(int device) noexcept : device_(device) {}

  void mark(StreamId stream) override;
  [[nodiscard]] bool passed() override;
  [[nodiscard]] std::span<const std::uint64_t> times_ns() const noexcept override {
    return times_ns_;
  }
  void forget() noexcept override;

 private:
  /// Reads the time of the first mark whose time is not known. Returns false where the device has
  /// not come to it.
  [[nodiscard]] bool read_next();

  const int device_;
  EventPool events_{EventPool::Timing::kOn};
  /// One for each mark; nullptr where it and the next one are read.
  std::vector<cudaEvent_t> marks_;
  std::vector<std::uint64_t> times_ns_;  // of the marks that are read
};

}  // namespace castor::cuda
