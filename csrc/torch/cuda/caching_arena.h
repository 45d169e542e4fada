#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <string>

#include "core/memory_tier.h"

namespace castor {

/// Device arena of a GPU: blocks of torch's CUDA caching allocator, so that chunk slots and
/// activations share one memory. The allocator's statistics count the blocks, its out-of-memory
/// retry frees cached blocks for them, and set_per_process_memory_fraction bounds them.
///
/// A block comes from the pool of the stream that it is taken for. Work that this stream is given
/// afterwards may use the block at once; other streams must wait for what that stream had been
/// given before. When the block goes back, its pool's stream waits for the stream that used it
/// last, and for those that Tensor.record_stream named (BlockStreams). The allocator then reuses
/// the block as it does a tensor's memory. Copies of castor::cuda::StreamCopyEngine keep to that
/// order by CopyRequest::behind and order.
///
/// Owned by its MemoryTier. Thread-safe.
class CachingArena final : public Arena {
 public:
  /// Throws InvalidArgument if torch has no such CUDA device.
  explicit CachingArena(c10::DeviceIndex device);

  /// Same as allocate_on, for the calling thread's current stream of the device.
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override;
  /// Same as deallocate_behind, for the calling thread's current stream.
  void deallocate(std::byte* data, std::size_t bytes) noexcept override;
  /// Throws OutOfMemory after torch has freed what it had cached. The error has the figures of the
  /// GPU, and torch's message.
  [[nodiscard]] std::byte* allocate_on(std::size_t bytes, StreamId stream) override;
  void deallocate_behind(std::byte* data, std::size_t bytes, StreamId stream) noexcept override;
  void add_user(const std::byte* data, StreamId stream) override;
  void await_users(const std::byte* data, StreamId stream) override;
  [[nodiscard]] std::string description() const override;

 private:
  const c10::DeviceIndex device_;
};

/// Bytes of torch's caching allocator on a device.
struct CachedBytes {
  std::size_t allocated = 0;       ///< now, by tensors and by CachingArena
  std::size_t peak_allocated = 0;  ///< since the last reset_peak_memory_stats
  std::size_t reserved = 0;        ///< taken from the GPU: allocated, and cached for reuse
};

/// Returns the bytes on a device, without synchronisation. The non-model memory of a boosted model
/// is `allocated` less its slots.
[[nodiscard]] CachedBytes cached_bytes(c10::DeviceIndex device);

}  // namespace castor
