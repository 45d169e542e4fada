#include "parallel/thread_executor.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>

#include "core/error.h"
#include "parallel/cores.h"

namespace castor {

/// One parallel_for, on its caller's stack. The caller leaves only when no worker is in it.
struct ThreadExecutor::Loop {
  const std::size_t count;
  const std::function<void(std::size_t)>& body;
  // Relaxed: hands out indices, each once. What the bodies write is published by mutex_, which
  // every worker takes when it leaves and the caller takes last.
  std::atomic<std::size_t> next{0};
  std::size_t num_workers = 0;  // guarded by mutex_
  std::exception_ptr error;     // guarded by mutex_; the first one
};

ThreadExecutor::ThreadExecutor() : ThreadExecutor(num_available_cores()) {}

ThreadExecutor::ThreadExecutor(std::size_t num_threads) {
  if (num_threads == 0) {
    throw InvalidArgument("an executor cannot have 0 threads; give 1 or more");
  }
  workers_.reserve(num_threads - 1);
  for (std::size_t i = 1; i < num_threads; ++i) {
    workers_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }
}

ThreadExecutor::~ThreadExecutor() = default;

void ThreadExecutor::parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) {
  Loop loop{.count = count, .body = body};
  if (count > 1 && !workers_.empty()) {
    {
      const MutexLock lock(mutex_);
      loops_.push_back(&loop);
    }
    loop_ready_.notify_all();
  }
  run(loop);
  {
    MutexLock lock(mutex_);
    retire(loop);
    loop_left_.wait(lock.native(), [&] { return loop.num_workers == 0; });
  }
  if (loop.error) {
    std::rethrow_exception(loop.error);
  }
}

void ThreadExecutor::work(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  while (loop_ready_.wait(lock.native(), stop,
                          [&]() CASTOR_REQUIRES(mutex_) { return !loops_.empty(); })) {
    Loop& loop = *loops_.front();
    ++loop.num_workers;
    lock.unlock();
    run(loop);
    lock.lock();
    retire(loop);
    if (--loop.num_workers == 0) {
      loop_left_.notify_all();  // several callers may wait here, each for its own loop
    }
  }
}

void ThreadExecutor::run(Loop& loop) noexcept {
  for (;;) {
    const std::size_t i = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= loop.count) {
      return;
    }
    try {
      loop.body(i);
    } catch (...) {
      loop.next.store(loop.count, std::memory_order_relaxed);  // skip what nobody has taken
      const MutexLock lock(mutex_);
      if (!loop.error) {
        loop.error = std::current_exception();
      }
    }
  }
}

void ThreadExecutor::retire(const Loop& loop) {
  // All its indices are taken. Whoever notices first removes it.
  if (const auto found = std::find(loops_.begin(), loops_.end(), &loop); found != loops_.end()) {
    loops_.erase(found);
  }
}

}  // namespace castor
