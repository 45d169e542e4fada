#include "parallel/async_copy_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/check_copy.h"

namespace castor {

AsyncCopyEngine::AsyncCopyEngine(AsyncCopyOptions options) : options_(std::move(options)) {
  for (std::size_t direction = 0; direction < workers_.size(); ++direction) {
    workers_[direction] =
        std::jthread([this, direction](const std::stop_token& stop) { work(stop, direction); });
  }
}

AsyncCopyEngine::~AsyncCopyEngine() {
  MutexLock lock(mutex_);
  completed_.wait(lock.native(), [this]() CASTOR_REQUIRES(mutex_) { return tickets_.all_done(); });
}

CopyTicket AsyncCopyEngine::submit(const CopyRequest& request) {
  check_copy(request);
  const auto direction = static_cast<std::size_t>(request.direction);
  CopyTicket ticket = CopyTicket::kNone;
  {
    const MutexLock lock(mutex_);
    queues_[direction].push_back(request);
    ticket = tickets_.give(direction);
  }
  submitted_.notify_all();
  return ticket;
}

void AsyncCopyEngine::wait(CopyTicket ticket) {
  MutexLock lock(mutex_);
  const CopyNumber copy = tickets_.find(ticket);
  completed_.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex_) { return tickets_.done(copy); });
  tickets_.rethrow(copy);
}

bool AsyncCopyEngine::done(CopyTicket ticket) {
  const MutexLock lock(mutex_);
  return tickets_.done(tickets_.find(ticket));
}

void AsyncCopyEngine::work(const std::stop_token& stop, std::size_t direction) {
  Clock::time_point link_free;
  MutexLock lock(mutex_);
  auto& queue = queues_[direction];
  while (submitted_.wait(lock.native(), stop, [&] { return !queue.empty(); })) {
    const CopyRequest request = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    try {
      if (request.await_source) {
        request.await_source();
      }
      copy(request, &link_free);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure) {
      tickets_.fail({.direction = direction, .number = tickets_.num_done(direction) + 1},
                    std::move(failure));
    }
    tickets_.complete(direction);
    completed_.notify_all();
  }
}

// The emulated link is busy for bytes / bandwidth from when it is free: a queue keeps it busy.
void AsyncCopyEngine::copy(const CopyRequest& request, Clock::time_point* link_free) const {
  const Clock::time_point start = Clock::now();
  if (options_.copy) {
    options_.copy(request);
  } else if (!request.source.empty()) {
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }
  if (options_.bytes_per_second == 0) {
    return;
  }
  const std::chrono::duration<double> busy(static_cast<double>(request.source.size()) /
                                           static_cast<double>(options_.bytes_per_second));
  *link_free = std::max(*link_free, start) + std::chrono::duration_cast<Clock::duration>(busy);
  std::this_thread::sleep_until(*link_free);
}

}  // namespace castor
