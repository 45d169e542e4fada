#include "parallel/update_queue.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {
namespace {

constexpr std::size_t kAnnounced = 8;

}  // namespace

UpdateQueue::UpdateQueue(std::size_t num_chunks, UpdateOrder order)
    : order_(order),
      pending_(num_chunks, false),
      worker_([this](const std::stop_token& stop) { work(stop); }) {}

UpdateQueue::~UpdateQueue() = default;

void UpdateQueue::rethrow_failure() const {
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

void UpdateQueue::submit(ChunkId chunk, UpdateFunction update) {
  {
    const MutexLock lock(mutex_);
    rethrow_failure();
    if (pending_[index(chunk)]) {
      throw UsageError("chunk " + std::to_string(index(chunk)) +
                       " is updated twice: its last update is not over yet");
    }
    updates_.push_back({chunk, std::move(update)});
    pending_[index(chunk)] = true;
    ++num_pending_;
  }
  submitted_.notify_one();
}

bool UpdateQueue::pending(ChunkId chunk) const noexcept {
  const MutexLock lock(mutex_);
  return pending_[index(chunk)];
}

void UpdateQueue::wait(ChunkId chunk) {
  MutexLock lock(mutex_);
  if (pending_[index(chunk)]) {
    const auto found =
        std::find_if(updates_.begin(), updates_.end(),
                     [chunk](const Update& update) { return update.chunk == chunk; });
    if (found != updates_.end() && order_ == UpdateOrder::kWanted) {
      std::rotate(updates_.begin(), found, found + 1);
    }
    completed_.wait(lock.native(),
                    [&]() CASTOR_REQUIRES(mutex_) { return !pending_[index(chunk)]; });
  }
  rethrow_failure();
}

void UpdateQueue::drain() {
  MutexLock lock(mutex_);
  completed_.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex_) { return num_pending_ == 0; });
  rethrow_failure();
}

void UpdateQueue::abandon() {
  MutexLock lock(mutex_);
  completed_.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex_) { return num_pending_ == 0; });
  failure_ = nullptr;
}

// A stop request ends the wait for more, not the work that is there.
void UpdateQueue::work(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  while (submitted_.wait(lock.native(), stop,
                         [&]() CASTOR_REQUIRES(mutex_) { return !updates_.empty(); })) {
    Update update = std::move(updates_.front());
    updates_.pop_front();
    std::vector<ChunkId> next;
    for (std::size_t i = 0; i < std::min(updates_.size(), kAnnounced); ++i) {
      next.push_back(updates_[i].chunk);
    }
    lock.unlock();
    std::exception_ptr failure;
    try {
      update.run(next);
    } catch (...) {
      failure = std::current_exception();
    }
    update.run = nullptr;  // what it holds goes before anybody hears that it is over
    lock.lock();
    pending_[index(update.chunk)] = false;
    --num_pending_;
    if (failure) {
      failure_ = failure;
      for (const Update& dropped : updates_) {
        pending_[index(dropped.chunk)] = false;
      }
      num_pending_ = 0;
      updates_.clear();
    }
    completed_.notify_all();
  }
}

}  // namespace castor
