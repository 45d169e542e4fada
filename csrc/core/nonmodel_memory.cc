#include "core/nonmodel_memory.h"

#include "core/error.h"

namespace castor {

bool NonModelMemory::try_allocate(std::size_t bytes) noexcept {
  if (!device_->ledger().try_take(bytes)) {
    return false;
  }
  note_taken(bytes);
  return true;
}

void NonModelMemory::note_taken(std::size_t bytes) noexcept {
  peaks_.note(bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
}

void NonModelMemory::allocate(std::size_t bytes) {
  if (!device_->ledger().try_take(bytes)) {
    const MutexLock lock(reclaim_mutex_);
    // Another thread may take what was reclaimed for this one: try until there is nothing to give.
    do {
      if (reclaimer_ == nullptr) {
        const Ledger& ledger = device_->ledger();
        throw OutOfMemory(TierKind::kDevice, bytes, ledger.available(), ledger.budget(),
                          "the model that owned this budget is gone; free its tensors");
      }
      reclaimer_->reclaim(bytes);
    } while (!device_->ledger().try_take(bytes));
  }
  note_taken(bytes);
}

void NonModelMemory::make_room(std::size_t bytes) {
  if (fits(bytes)) {
    return;
  }
  const MutexLock lock(reclaim_mutex_);
  if (reclaimer_ != nullptr) {
    reclaimer_->reclaim(bytes);
  }
}

bool NonModelMemory::evict_refused(std::size_t bytes) {
  const MutexLock lock(reclaim_mutex_);
  return reclaimer_ != nullptr && reclaimer_->evict_refused(bytes);
}

void NonModelMemory::note_allocated(std::size_t bytes) noexcept {
  device_->ledger().take_anyway(bytes);
  note_taken(bytes);
}

void NonModelMemory::free(std::size_t bytes) noexcept {
  bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  device_->ledger().give_back(bytes);
}

void NonModelMemory::set_reclaimer(Reclaimer* reclaimer) {
  const MutexLock lock(reclaim_mutex_);
  orphaned_.store(reclaimer == nullptr, std::memory_order_relaxed);
  reclaimer_ = reclaimer;
}

}  // namespace castor
