#include "store/gradient_copies.h"

#include <algorithm>
#include <utility>

namespace castor {

GradientCopies::GradientCopies(const ChunkLayout& layout, CopyEngine& engine, MemoryTier& device,
                               DeviceBackend& backend, NonModelMemory& account)
    : engine_(engine),
      device_(device),
      backend_(backend),
      account_(account),
      window_(device.ledger().reserve(backend.allocated_for(largest_gradient_bytes(layout)),
                                      "the largest gradient needs that much on its way to the "
                                      "host; raise device_memory")) {}

GradientCopies::~GradientCopies() {
  for (const Copy& copy : copies_) {
    if (copy.handed_over) {
      account_.take_back(copy.bytes);
    }
    try {
      engine_.wait(copy.ticket);
    } catch (...) {  // the payload stays incomplete; nobody is left to tell
    }
  }
}

bool GradientCopies::submit(ChunkId chunk, std::span<std::byte> gradient,
                            std::shared_ptr<void> memory, std::span<std::byte> target) {
  std::vector<Copy> arrived;
  const MutexLock lock(mutex_);
  rethrow_failure();
  const std::size_t needed = backend_.allocated_for(gradient.size());
  if (gradient.empty() || needed > window_.bytes()) {
    return false;
  }
  while (!copies_.empty() &&
         (used_bytes_ + needed > window_.bytes() || engine_.done(copies_.front().ticket))) {
    complete_first(arrived);
  }
  const CopyTicket ticket = engine_.submit({.source = gradient,
                                            .target = target,
                                            .direction = CopyDirection::kDeviceToHost,
                                            .behind = device_.stream(),
                                            .await_source = {}});
  Copy& copy = copies_.emplace_back(Copy{chunk, ticket, std::move(memory), needed});
  used_bytes_ += needed;
  copy.handed_over = !backend_.stop_counting(gradient.data());
  if (copy.handed_over) {
    account_.hand_over(needed);
  }
  return true;
}

void GradientCopies::complete_first(std::vector<Copy>& arrived) {
  const Copy& copy = arrived.emplace_back(std::move(copies_.front()));
  copies_.pop_front();
  used_bytes_ -= copy.bytes;
  if (copy.handed_over) {
    account_.take_back(copy.bytes);
  }
  try {
    engine_.wait(copy.ticket);
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void GradientCopies::rethrow_failure() const {
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

CopyTicket GradientCopies::last_of(ChunkId chunk) const {
  const MutexLock lock(mutex_);
  CopyTicket last = CopyTicket::kNone;
  for (const Copy& copy : copies_) {
    last = copy.chunk == chunk ? copy.ticket : last;
  }
  return last;
}

// The copies stay in the window: whoever calls submit() or wait() next completes them.
void GradientCopies::wait_beside(ChunkId chunk) {
  {
    const MutexLock lock(mutex_);
    rethrow_failure();
  }
  engine_.wait(last_of(chunk));
}

// Copies of one direction complete in order: what was sent before the chunk's last has arrived too.
void GradientCopies::wait(ChunkId chunk) {
  std::vector<Copy> arrived;
  const MutexLock lock(mutex_);
  rethrow_failure();
  const auto is_of_chunk = [chunk](const Copy& copy) { return copy.chunk == chunk; };
  const auto last = std::find_if(copies_.rbegin(), copies_.rend(), is_of_chunk);
  for (auto left = copies_.rend() - last; left > 0; --left) {
    complete_first(arrived);
  }
}

}  // namespace castor
