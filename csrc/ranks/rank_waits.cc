#include "ranks/rank_waits.h"

#include <pthread.h>

#include <algorithm>

namespace castor {

RankWaits::Wait::~Wait() {
  if (waits_ != nullptr) {
    const MutexLock lock(waits_->mutex_);
    waits_->entries_.erase(entry_);
  }
}

RankWaits::Wait RankWaits::begin(Describe describe) {
  const MutexLock lock(mutex_);
  const auto thread = static_cast<std::uint64_t>(::pthread_self());
  Entry entry{.describe = std::move(describe), .thread = thread};
  return {*this, entries_.insert(entries_.end(), std::move(entry))};
}

std::optional<LongWait> RankWaits::look(int looks, std::span<const std::uint64_t> served) {
  const MutexLock lock(mutex_);
  bool telling = std::ranges::none_of(entries_, &Entry::told);
  std::optional<LongWait> told;
  for (Entry& entry : entries_) {
    if (++entry.looks < looks || !telling || std::ranges::count(served, entry.thread) > 0) {
      continue;
    }
    told = entry.describe();
    if (told) {
      told->thread = entry.thread;
      entry.told = true;
      telling = false;
    }
  }
  return told;
}

void RankPlace::set(std::string place) {
  auto now = place.empty() ? nullptr : std::make_shared<const std::string>(std::move(place));
  const MutexLock lock(mutex_);
  now_ = std::move(now);
}

void RankPlace::met() {
  const MutexLock lock(mutex_);
  last_ = now_;
}

RankWaits::Wait RankPlace::wait(std::function<std::string()> awaited) {
  return waits_->begin([this, awaited = std::move(awaited)]() -> std::optional<LongWait> {
    const MutexLock lock(mutex_);
    if (!now_) {
      return std::nullopt;
    }
    return LongWait{.rank = rank_,
                    .size = size_,
                    .place = *now_,
                    .awaited = awaited(),
                    .last = last_ ? *last_ : ""};
  });
}

}  // namespace castor
