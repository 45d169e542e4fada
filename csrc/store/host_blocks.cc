#include "store/host_blocks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"

namespace castor {

Block HostBlocks::take_kept(std::size_t bytes) {
  const MutexLock lock(mutex_);
  const auto of_size = [bytes](const Block& block) { return block.bytes() == bytes; };
  const auto kept = std::find_if(kept_.begin(), kept_.end(), of_size);
  if (kept == kept_.end()) {
    return {};
  }
  Block block = std::move(*kept);
  kept_.erase(kept);
  kept_bytes_ -= bytes;
  return block;
}

Block HostBlocks::take(std::size_t bytes) {
  Block block = take_kept(bytes);
  if (!block) {
    try {
      block = host_.allocate(bytes, remedy_);
    } catch (const OutOfMemory&) {
      std::deque<Block> other_sizes;  // freed without the mutex
      {
        const MutexLock lock(mutex_);
        if (kept_.empty()) {
          throw;
        }
        other_sizes.swap(kept_);
        kept_bytes_ = 0;
      }
      other_sizes.clear();
      block = host_.allocate(bytes, remedy_);
    }
  }
  const MutexLock lock(mutex_);
  used_bytes_ += bytes;
  most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
  return block;
}

void HostBlocks::give_back(Block block) noexcept {
  std::vector<Block> longest_kept;  // freed without the mutex
  const MutexLock lock(mutex_);
  used_bytes_ -= block.bytes();
  kept_bytes_ += block.bytes();
  kept_.push_back(std::move(block));
  while (kept_bytes_ > most_used_bytes_) {
    kept_bytes_ -= kept_.front().bytes();
    longest_kept.push_back(std::move(kept_.front()));
    kept_.pop_front();
  }
}

std::size_t HostBlocks::kept_bytes() const {
  const MutexLock lock(mutex_);
  return kept_bytes_;
}

}  // namespace castor
