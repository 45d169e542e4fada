#include "core/nonmodel_memory.h"

#include "core/error.h"

namespace castor {

bool NonModelMemory::try_allocate(std::size_t bytes) noexcept {
  if (!device_->try_take(bytes)) {
    return false;
  }
  note_taken(bytes);
  return true;
}

void NonModelMemory::note_taken(std::size_t bytes) noexcept {
  peaks_.note(bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
}

void NonModelMemory::allocate(std::size_t bytes) {
  if (!device_->try_take(bytes)) {
    const MutexLock lock(reclaim_mutex_);
    // Another thread may take what was reclaimed for this one: try until there is nothing to give.
    do {
      if (reclaimers_.empty()) {
        throw device_->out_of_memory(bytes,
                                     "the model that owned this budget is gone; free its tensors");
      }
      reclaimers_.back()->reclaim(bytes);
    } while (!device_->try_take(bytes));
  }
  note_taken(bytes);
}

void NonModelMemory::make_room(std::size_t bytes) {
  if (fits(bytes)) {
    return;
  }
  const MutexLock lock(reclaim_mutex_);
  if (!reclaimers_.empty()) {
    reclaimers_.back()->reclaim(bytes);
  }
}

bool NonModelMemory::evict_refused(std::size_t bytes) {
  const MutexLock lock(reclaim_mutex_);
  return !reclaimers_.empty() && reclaimers_.back()->evict_refused(bytes);
}

void NonModelMemory::note_allocated(std::size_t bytes) noexcept {
  device_->take_anyway(bytes);
  note_taken(bytes);
}

void NonModelMemory::free(std::size_t bytes) noexcept {
  bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  device_->give_back(bytes);
}

void NonModelMemory::add_reclaimer(Reclaimer* reclaimer) {
  const MutexLock lock(reclaim_mutex_);
  reclaimers_.push_back(reclaimer);
  orphaned_.store(false, std::memory_order_relaxed);
}

void NonModelMemory::remove_reclaimer(Reclaimer* reclaimer) {
  const MutexLock lock(reclaim_mutex_);
  std::erase(reclaimers_, reclaimer);
  orphaned_.store(reclaimers_.empty(), std::memory_order_relaxed);
}

}  // namespace castor
