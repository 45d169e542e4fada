#include "ranks/backward_reductions.h"

#include <algorithm>
#include <utility>

namespace castor {
namespace {

/// A chunk is passed over when so many of those behind it are complete: two chunks share a module,
/// and what is last in one may come before what is first in the other.
constexpr std::ptrdiff_t kPassedOver = 2;

}  // namespace

BackwardReductions::BackwardReductions(std::shared_ptr<Collectives> ranks, std::size_t num_chunks,
                                       std::vector<ChunkId> order, Reduce reduce)
    : ranks_(std::move(ranks)),
      order_(std::move(order)),
      reduce_(std::move(reduce)),
      states_(num_chunks, State::kLeft) {
  for (const ChunkId chunk : order_) {
    states_[index(chunk)] = State::kAwaited;
  }
  worker_ = std::jthread([this](const std::stop_token& stop) { work(stop); });
}

BackwardReductions::~BackwardReductions() {
  worker_.request_stop();
  if (under_way()) {
    ranks_->leave();  // who waits for this rank, and this rank itself
  }
}

bool BackwardReductions::under_way() const {
  const MutexLock lock(mutex_);
  return under_way_;
}

void BackwardReductions::rethrow_failure() const {
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

bool BackwardReductions::complete(ChunkId chunk) {
  {
    const MutexLock lock(mutex_);
    rethrow_failure();
    if (state(chunk) != State::kAwaited) {
      return false;
    }
    state(chunk) = State::kComplete;
    ++num_waiting_;
    under_way_ = true;
  }
  changed_.notify_one();
  return true;
}

void BackwardReductions::wait(ChunkId chunk) {
  MutexLock lock(mutex_);
  awaited_ = chunk;
  changed_.notify_one();
  taken_.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex_) {
    return failure_ != nullptr || state(chunk) != State::kComplete;
  });
  awaited_.reset();
  rethrow_failure();
}

BackwardReductions::Progress BackwardReductions::wait_for_others(
    std::chrono::milliseconds patience) {
  MutexLock lock(mutex_);
  rethrow_failure();
  if (next_ == order_.size() || state(order_[next_]) != State::kComplete) {
    return Progress::kNobodysTurn;
  }
  const std::size_t before = next_;
  const bool moved = taken_.wait_for(lock.native(), patience, [&]() CASTOR_REQUIRES(mutex_) {
    return failure_ != nullptr || next_ != before;
  });
  rethrow_failure();
  return moved ? Progress::kMade : Progress::kNone;
}

bool BackwardReductions::wait_for_next() {
  std::optional<ChunkId> next;
  {
    const MutexLock lock(mutex_);
    rethrow_failure();
    const auto complete = [this](ChunkId chunk)
                              CASTOR_REQUIRES(mutex_) { return state(chunk) == State::kComplete; };
    if (const auto found = std::ranges::find_if(order_, complete); found != order_.end()) {
      next = *found;
    }
  }
  if (next) {
    wait(*next);
  }
  return next.has_value();
}

std::vector<bool> BackwardReductions::end_pass() {
  {
    const MutexLock lock(mutex_);
    under_way_ = true;
    over_ = true;
  }
  changed_.notify_one();
  MutexLock lock(mutex_);
  taken_.wait(lock.native(),
              [&]() CASTOR_REQUIRES(mutex_) { return failure_ != nullptr || !under_way_; });
  rethrow_failure();
  std::vector<bool> reduced(states_.size(), false);
  for (const ChunkId chunk : order_) {
    reduced[index(chunk)] = state(chunk) == State::kReduced;
    state(chunk) = State::kAwaited;
  }
  next_ = 0;
  over_ = false;
  return reduced;
}

bool BackwardReductions::decided() const {
  const auto complete = [this](ChunkId chunk) CASTOR_REQUIRES(mutex_) {
    return states_[index(chunk)] == State::kComplete;
  };
  const auto next = order_.begin() + static_cast<std::ptrdiff_t>(next_);
  return over_ || complete(*next) || (awaited_ && complete(*awaited_)) ||
         std::count_if(next + 1, order_.end(), complete) >= kPassedOver;
}

void BackwardReductions::work(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  while (changed_.wait(lock.native(), stop, [&]() CASTOR_REQUIRES(mutex_) {
    return under_way_ && (next_ == order_.size() ? over_ : decided());
  })) {
    if (next_ == order_.size()) {
      under_way_ = false;
      taken_.notify_all();
      continue;
    }
    const ChunkId chunk = order_[next_];
    const bool own = state(chunk) == State::kComplete;
    lock.unlock();
    bool all = false;
    std::exception_ptr failure;
    try {
      all = all_true(*ranks_, own);
      if (all) {
        reduce_(chunk);
      }
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    num_waiting_ -= state(chunk) == State::kComplete ? 1 : 0;
    state(chunk) = all ? State::kReduced : State::kLeft;
    ++next_;
    failure_ = failure;
    taken_.notify_all();
    if (failure) {
      return;
    }
  }
}

}  // namespace castor
