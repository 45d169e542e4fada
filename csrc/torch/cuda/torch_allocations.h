#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>

#include "cuda/block_streams.h"
#include "torch/device_backend.h"

namespace castor {

/// Follows what torch's CUDA caching allocator does for others than castor.
///
/// Torch's allocator stays what it is; one that hands every call on to it stands before it from the
/// first follower on, for the rest of the process. Before an allocation it has the accounts of the
/// device make room, and while the device refuses one it has them evict and tries again, until
/// nothing may leave. What was taken and given back, and where, the allocator's own trace tells (it
/// needs no recording switched on). Tensor.record_stream on castor's blocks, which the allocator
/// would not take for its own, goes to own_blocks.
///
/// Throws Error for an allocator that is not torch's own.
void follow_torch_allocations(c10::DeviceIndex device,
                              const std::shared_ptr<DeviceAccount>& account);

/// While it lives, what this thread allocates and frees is castor's own: a slot, a payload.
class OwnAllocation {
 public:
  OwnAllocation() noexcept;
  ~OwnAllocation();
  OwnAllocation(const OwnAllocation&) = delete;
  OwnAllocation& operator=(const OwnAllocation&) = delete;
  /// On this thread, now.
  [[nodiscard]] static bool under_way() noexcept;
};

/// Castor's blocks on a device, of all sessions.
[[nodiscard]] cuda::BlockStreams& own_blocks(c10::DeviceIndex device) noexcept;

/// Castor's own bytes on a device rose by that much (or fell): allocated_bytes of torch's
/// statistics holds them too.
void count_own_bytes(c10::DeviceIndex device, std::ptrdiff_t bytes) noexcept;

/// What torch's allocator takes for a request: multiples of 512 bytes.
[[nodiscard]] constexpr std::size_t allocated_for(std::size_t bytes) noexcept {
  constexpr std::size_t kBlock = 512;
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

}  // namespace castor
