#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "core/memory_tier.h"

namespace castor {

/// The device arena of a GPU: blocks of torch's CUDA caching allocator, in the pool of the compute
/// stream, so that chunk slots and activations share one memory. Its statistics count them, its
/// out-of-memory retry frees cached blocks for them, and set_per_process_memory_fraction bounds
/// them.
///
/// A block is ordered as a tensor's memory is: what the compute stream is given after allocate()
/// may use it at once, other streams must wait for what the compute stream had been given before,
/// and after deallocate() only the compute stream may reuse it, so that other streams' work on it
/// must be behind the compute stream by then. castor::cuda::StreamCopyEngine keeps the first rule
/// by itself, and the second where every copy in is waited for before its slot goes.
///
/// Owned by its MemoryTier. Thread-safe.
class CachingArena final : public Arena {
 public:
  /// Called with each block before it goes back to the allocator.
  using Leaving = std::function<void(std::span<const std::byte> block)>;

  /// Throws InvalidArgument if torch has no such CUDA device.
  explicit CachingArena(c10::DeviceIndex device, Leaving leaving = {});

  /// On the calling thread's current stream of the device. Throws OutOfMemory (its figures are
  /// those of the GPU, torch's message is in it) after torch has freed what it had cached.
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override;
  void deallocate(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] std::string description() const override;

 private:
  const c10::DeviceIndex device_;
  const Leaving leaving_;
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
