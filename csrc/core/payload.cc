#include "core/payload.h"

#include <cassert>
#include <cstring>

namespace castor {

void Payload::move_to(std::shared_ptr<MemoryTier> tier, Block block) noexcept {
  assert(!away() && block.bytes() >= bytes());
  away_tier_ = std::move(tier);
  away_ = std::move(block);
  data_ = away_.data();
  tell_followers();
  give_copy_back();
  host_.discard();
}

Block Payload::move_to_host() noexcept {
  assert(away());
  data_ = host_storage();
  tell_followers();
  away_tier_.reset();
  return std::move(away_);
}

void Payload::take_copy(CopyContents contents) {
  if (!needs_copies() || has_copy()) {
    return;
  }
  Block copy = copies_->take(bytes_);
  if (contents == CopyContents::kStorage) {
    std::memcpy(copy.data(), host_.data(), bytes_);
  } else {
    std::memset(copy.data(), 0, bytes_);
  }
  copy_ = std::move(copy);
  if (!away()) {
    data_ = copy_.data();
    tell_followers();
  }
}

void Payload::drop_copy() noexcept {
  if (!has_copy()) {
    return;
  }
  if (!away()) {
    data_ = host_.data();
    tell_followers();
  }
  give_copy_back();
}

void Payload::give_copy_back() noexcept {
  if (has_copy()) {
    copies_->give_back(std::move(copy_));
  }
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
