#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <string>

#include "core/memory_tier.h"

namespace castor {

/// The device arena of a GPU: blocks of torch's CUDA caching allocator, so that chunk slots and
/// activations share one memory. Its statistics count them, its out-of-memory retry frees cached
/// blocks for them, and set_per_process_memory_fraction bounds them.
///
/// A block comes from the pool of the stream it is taken for. What that stream is given afterwards
/// may use it at once, other streams must wait for what it had been given before. When the block
/// goes back, its pool's stream waits for the stream that it was used on last, and for those that
/// Tensor.record_stream told of (BlockStreams): the allocator then reuses it as it does a tensor's
/// memory. Copies of castor::cuda::StreamCopyEngine keep to that by CopyRequest::behind and order.
///
/// Owned by its MemoryTier. Thread-safe.
class CachingArena final : public Arena {
 public:
  /// Throws InvalidArgument if torch has no such CUDA device.
  explicit CachingArena(c10::DeviceIndex device);

  /// On the calling thread's current stream of the device.
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override;
  /// Behind the calling thread's current stream.
  void deallocate(std::byte* data, std::size_t bytes) noexcept override;
  /// Throws OutOfMemory (its figures are those of the GPU, torch's message is in it) after torch
  /// has freed what it had cached.
  [[nodiscard]] std::byte* allocate_on(std::size_t bytes, StreamId stream) override;
  void deallocate_behind(std::byte* data, std::size_t bytes, StreamId stream) noexcept override;
  void add_user(const std::byte* data, StreamId stream) override;
  void await_users(const std::byte* data, StreamId stream) override;
  [[nodiscard]] std::string description() const override;

 private:
  const c10::DeviceIndex device_;
};

/// What torch's caching allocator holds on a device, in bytes.
struct CachedBytes {
  std::size_t allocated = 0;       ///< by tensors and by CachingArena, now
  std::size_t peak_allocated = 0;  ///< since the last reset_peak_memory_stats
  std::size_t reserved = 0;        ///< of the GPU's memory: allocated, and cached for reuse
};

/// No synchronisation. The non-model memory of a boosted model is `allocated` less its slots.
[[nodiscard]] CachedBytes cached_bytes(c10::DeviceIndex device);

}  // namespace castor
