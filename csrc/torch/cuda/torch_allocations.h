#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>

#include "cuda/block_streams.h"
#include "store/device_backend.h"

namespace castor {

/// Reports to `account` what torch's CUDA caching allocator does for others than castor.
///
/// Torch's allocator stays what it is. From the first follower on, for the rest of the process, an
/// allocator stands before it that hands every call on to it. Before an allocation, that one has
/// the accounts of the device make room. While the device refuses the allocation, it has the
/// accounts evict and tries again, until nothing may leave. The allocator's own trace tells what
/// was taken and given back, and where; it needs no recording switched on. Tensor.record_stream on
/// castor's blocks goes to own_blocks, because torch's allocator would not take them for its own.
///
/// Throws Error for an allocator that is not torch's own.
void follow_torch_allocations(c10::DeviceIndex device,
                              const std::shared_ptr<DeviceAccount>& account);

/// Scope in which the memory that this thread allocates and frees is castor's own: a slot, a
/// payload.
class OwnAllocation {
 public:
  OwnAllocation() noexcept;
  ~OwnAllocation();
  OwnAllocation(const OwnAllocation&) = delete;
  OwnAllocation& operator=(const OwnAllocation&) = delete;
  /// Returns whether this thread is in such a scope now.
  [[nodiscard]] static bool under_way() noexcept;
};

/// Returns castor's blocks on a device, those of all sessions.
[[nodiscard]] cuda::BlockStreams& own_blocks(c10::DeviceIndex device) noexcept;

/// Counts that castor's own bytes on a device rose by `bytes` (or fell, if negative).
/// allocated_bytes of torch's statistics includes them.
void count_own_bytes(c10::DeviceIndex device, std::ptrdiff_t bytes) noexcept;

/// Returns the bytes that torch's allocator takes for a request: multiples of 512 bytes.
[[nodiscard]] constexpr std::size_t allocated_for(std::size_t bytes) noexcept {
  constexpr std::size_t kBlock = 512;
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

}  // namespace castor
