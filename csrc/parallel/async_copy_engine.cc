#include "parallel/async_copy_engine.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/check_copy.h"
#include "core/error.h"

namespace castor {
namespace {

// A ticket is 2 * number + direction, the first number being 1: 0 stays "nothing".
CopyTicket ticket_of(std::size_t direction, std::uint64_t number) {
  return CopyTicket{2 * number + direction};
}

}  // namespace

AsyncCopyEngine::AsyncCopyEngine(AsyncCopyOptions options) : options_(std::move(options)) {
  for (std::size_t direction = 0; direction < workers_.size(); ++direction) {
    workers_[direction] =
        std::jthread([this, direction](const std::stop_token& stop) { work(stop, direction); });
  }
}

AsyncCopyEngine::~AsyncCopyEngine() {
  std::unique_lock lock(mutex_);
  completed_.wait(lock, [this] {
    return std::all_of(queues_.begin(), queues_.end(),
                       [](const Queue& queue) { return queue.num_done == queue.num_submitted; });
  });
}

CopyTicket AsyncCopyEngine::submit(const CopyRequest& request) {
  check_copy(request);
  const auto direction = static_cast<std::size_t>(request.direction);
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    Queue& queue = queues_[direction];
    queue.requests.push_back(request);
    number = ++queue.num_submitted;
  }
  submitted_.notify_all();
  return ticket_of(direction, number);
}

AsyncCopyEngine::Place AsyncCopyEngine::place_of(CopyTicket ticket) const {
  const auto value = static_cast<std::uint64_t>(ticket);
  const Place place{.direction = value % 2, .number = value / 2};
  const std::uint64_t last = queues_[place.direction].num_submitted;
  if (place.number > last || value == 1) {
    throw InvalidArgument("copy ticket " + std::to_string(value) + " was never given out; copy " +
                          std::to_string(last) + " is the last of its direction");
  }
  return place;
}

void AsyncCopyEngine::wait(CopyTicket ticket) {
  std::unique_lock lock(mutex_);
  const Place place = place_of(ticket);
  Queue& queue = queues_[place.direction];
  completed_.wait(lock, [&] { return queue.num_done >= place.number; });
  if (const auto failure = queue.failures.find(place.number); failure != queue.failures.end()) {
    std::rethrow_exception(failure->second);
  }
}

bool AsyncCopyEngine::done(CopyTicket ticket) {
  const std::lock_guard lock(mutex_);
  const Place place = place_of(ticket);
  return queues_[place.direction].num_done >= place.number;
}

void AsyncCopyEngine::work(const std::stop_token& stop, std::size_t direction) {
  Clock::time_point link_free;
  Queue& queue = queues_[direction];
  std::unique_lock lock(mutex_);
  while (submitted_.wait(lock, stop, [&] { return !queue.requests.empty(); })) {
    const CopyRequest request = std::move(queue.requests.front());
    queue.requests.pop_front();
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
    ++queue.num_done;
    if (failure) {
      queue.failures.emplace(queue.num_done, std::move(failure));
    }
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
