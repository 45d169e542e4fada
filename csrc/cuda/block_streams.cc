#include "cuda/block_streams.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <utility>

#include "cuda/scoped_device.h"
#include "cuda/stream_order.h"

namespace castor::cuda {

void BlockStreams::add(const std::byte* data, std::size_t bytes, StreamId stream) {
  const MutexLock lock(mutex_);
  blocks_.insert_or_assign(data, Block{.bytes = bytes, .pool = stream, .users = {}});
}

bool BlockStreams::record(const std::byte* data, StreamId stream) {
  const MutexLock lock(mutex_);
  auto found = blocks_.upper_bound(data);
  if (found == blocks_.begin())
    return false;
  --found;
  Block& block = found->second;
  if (std::greater_equal<>()(data, found->first + block.bytes))
    return false;
  if (std::find(block.users.begin(), block.users.end(), stream) == block.users.end())
    block.users.push_back(stream);
  return true;
}

void BlockStreams::await_users(const std::byte* data, StreamId stream) {
  const MutexLock lock(mutex_);
  const auto found = blocks_.find(data);
  if (found == blocks_.end())
    return;
  for (const StreamId user : found->second.users)
    order_streams(device_, user, stream);
  found->second.users.clear();
}

void BlockStreams::remove(const std::byte* data, StreamId stream) noexcept {
  const MutexLock lock(mutex_);
  const auto found = blocks_.find(data);
  assert(found != blocks_.end() && "a block went back that was never taken");
  const Block& block = found->second;
  try {
    order_streams(device_, stream, block.pool);
    for (const StreamId user : block.users)
      order_streams(device_, user, block.pool);
  } catch (...) {
    try {
      const ScopedDevice current(device_);
      static_cast<void>(cudaDeviceSynchronize());  // a failure is reported by what uses it next
    } catch (...) {                                // the device is gone
    }
  }
  blocks_.erase(found);
}

}  // namespace castor::cuda
