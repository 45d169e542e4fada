#include "core/host_blocks.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"

namespace castor {

HostBlocks::HostBlocks(std::shared_ptr<MemoryTier> host, std::string remedy, Account account,
                       std::size_t most_kept)
    : host_(std::move(host)),
      remedy_(std::move(remedy)),
      account_(account),
      most_kept_(most_kept) {}

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

std::deque<Block> HostBlocks::excess(std::size_t bytes) {
  std::deque<Block> longest_kept;
  while (kept_bytes_ > bytes) {
    kept_bytes_ -= kept_.front().bytes();
    longest_kept.push_back(std::move(kept_.front()));
    kept_.pop_front();
  }
  return longest_kept;
}

void HostBlocks::keep_at_most(std::size_t bytes) noexcept {
  std::deque<Block> freed;  // without the mutex
  const MutexLock lock(mutex_);
  freed = excess(bytes);
}

Block HostBlocks::make(std::size_t bytes) {
  if (account_ == Account::kHost) {
    Block kept = take_kept(bytes);
    return kept ? std::move(kept) : host_->allocate(bytes, remedy_);
  }
  Reservation paid = host_->ledger().reserve(bytes, remedy_);
  Block kept = take_kept(bytes);
  keep_at_most(host_->ledger().available());
  if (!kept) {
    return host_->allocate(std::move(paid));
  }
  kept.pay_with(std::move(paid));
  return kept;
}

Block HostBlocks::take(std::size_t bytes) {
  Block block;
  try {
    block = make(bytes);
  } catch (const OutOfMemory&) {
    if (kept_bytes() == 0) {
      throw;
    }
    keep_at_most(0);
    block = make(bytes);
  }
  const MutexLock lock(mutex_);
  used_bytes_ += bytes;
  most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
  return block;
}

void HostBlocks::give_back(Block block) noexcept {
  const std::size_t bytes = block.bytes();
  if (account_ == Account::kNobody) {
    block.pay_with(std::move(*unpaid_.try_reserve(bytes)));  // its budget has no end
  }
  std::deque<Block> freed;  // without the mutex
  const MutexLock lock(mutex_);
  used_bytes_ -= bytes;
  kept_bytes_ += bytes;
  kept_.push_back(std::move(block));
  freed = excess(account_ == Account::kHost ? std::min(most_kept_, most_used_bytes_) : most_kept_);
}

void HostBlocks::end() noexcept {
  {
    const MutexLock lock(mutex_);
    most_kept_ = 0;
  }
  keep_at_most(0);
}

std::size_t HostBlocks::kept_bytes() const {
  const MutexLock lock(mutex_);
  return kept_bytes_;
}

}  // namespace castor
