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

RankWaits::Wait RankWaits::begin(Describe describe, Abort abort) {
  const MutexLock lock(mutex_);
  const auto thread = static_cast<std::uint64_t>(::pthread_self());
  Entry entry{.describe = std::move(describe), .abort = std::move(abort), .thread = thread};
  const auto begun = entries_.insert(entries_.end(), std::move(entry));
  end_if_lost(*begun);
  return {*this, begun};
}

void RankWaits::end_if_lost(const Entry& entry) {
  if (!lost_.empty() && entry.abort) {
    aborted_ = true;
    entry.abort(lost_);
  }
}

void RankWaits::set_lost(const std::string& why) {
  const MutexLock lock(mutex_);
  if (why.empty() && aborted_) {
    return;
  }
  lost_ = why;
  for (const Entry& entry : entries_) {
    end_if_lost(entry);
  }
}

void RankWaits::set_health(std::shared_ptr<RankHealth> health) {
  if (health != nullptr) {
    const MutexLock lock(mutex_);
    lost_.clear();
    aborted_ = false;
  }
  const MutexLock lock(health_mutex_);
  health_ = std::move(health);
}

std::shared_ptr<RankHealth> RankWaits::health() const {
  const MutexLock lock(health_mutex_);
  return health_;
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
  if (const std::shared_ptr<RankHealth> health = now ? waits_->health() : nullptr) {
    health->set_place(*now);
  }
  const MutexLock lock(mutex_);
  now_ = std::move(now);
}

void RankPlace::met() {
  const MutexLock lock(mutex_);
  last_ = now_;
}

RankWaits::Wait RankPlace::wait(std::function<std::string()> awaited, RankWaits::Abort abort) {
  auto describe = [this, awaited = std::move(awaited)]() -> std::optional<LongWait> {
    const MutexLock lock(mutex_);
    if (!now_) {
      return std::nullopt;
    }
    const std::shared_ptr<RankHealth> health = waits_->health();
    return LongWait{.rank = health ? health->rank() : rank_,
                    .size = health ? health->size() : size_,
                    .place = *now_,
                    .awaited = awaited(),
                    .last = last_ ? *last_ : ""};
  };
  return waits_->begin(std::move(describe), std::move(abort));
}

std::string RankPlace::name() const {
  const std::shared_ptr<RankHealth> health = waits_->health();
  return health ? name_of_rank(health->rank(), health->size()) : name_of_rank(rank_, size_);
}

std::string RankPlace::name_of(std::size_t rank) const {
  return "rank " + std::to_string(number_of(rank));
}

LostRank RankPlace::find_lost() const {
  const std::shared_ptr<RankHealth> health = waits_->health();
  return health ? health->find_lost() : LostRank{};
}

std::string RankPlace::last_of(std::size_t rank) const {
  const std::shared_ptr<RankHealth> health = waits_->health();
  return health ? health->last_of(number_of(rank)) : "";
}

std::string RankPlace::explain(std::size_t rank, const std::string& error) const {
  const std::shared_ptr<RankHealth> health = waits_->health();
  if (!health) {
    return error;
  }
  std::string why = health->explain(number_of(rank), error);
  if (const LostRank lost = health->find_lost(); !lost.why.empty()) {
    waits_->set_lost(lost.why);  // other threads of this rank may wait for a rank that is stopped
  }
  return why;
}

}  // namespace castor
