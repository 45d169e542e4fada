#include "core/payload.h"

#include <cassert>

namespace castor {

void Payload::move_to(std::shared_ptr<MemoryTier> tier, Block block) noexcept {
  assert(!away() && block.bytes() >= bytes());
  away_tier_ = std::move(tier);
  away_ = std::move(block);
  data_ = away_.data();
  tell_followers();
  host_.discard();
}

Block Payload::move_to_host() noexcept {
  assert(away());
  data_ = host_.data();
  tell_followers();
  away_tier_.reset();
  return std::move(away_);
}

void Payload::add_follower(std::unique_ptr<PayloadFollower> follower) {
  const MutexLock lock(mutex_);
  std::erase_if(followers_, [](const auto& known) { return !known->alive(); });
  followers_.push_back(std::move(follower));
}

void Payload::tell_followers() noexcept {
  const MutexLock lock(mutex_);
  for (const auto& follower : followers_) {
    follower->moved(data_);
  }
}

}  // namespace castor
