#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <stop_token>
#include <thread>
#include <vector>

#include "core/executor.h"
#include "core/mutex.h"

namespace castor {

/// Executor over plain std::threads, for ThreadSanitizer builds and for builds without TBB. The
/// calling thread works on its own loop; idle threads sleep on a condition variable. Loops of
/// several callers are served in the order they came.
///
/// Owned by the runtime; loops in flight must have ended before it is destroyed. Thread-safe.
class ThreadExecutor final : public Executor {
 public:
  /// Makes as many threads as num_available_cores().
  ThreadExecutor();
  /// Makes `num_threads` threads, the calling thread included. Throws InvalidArgument if the number
  /// is 0, std::system_error if the system refuses a thread.
  explicit ThreadExecutor(std::size_t num_threads);
  ~ThreadExecutor() override;

  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) override;
  [[nodiscard]] std::size_t num_threads() const noexcept override { return workers_.size() + 1; }

 private:
  struct Loop;

  void work(const std::stop_token& stop);
  void run(Loop& loop) noexcept;
  void retire(const Loop& loop) CASTOR_REQUIRES(mutex_);

  Mutex mutex_;
  std::condition_variable_any loop_ready_;
  std::condition_variable loop_left_;
  // Loops with calls that nobody has taken yet.
  std::deque<Loop*> loops_ CASTOR_GUARDED_BY(mutex_);
  // Last: their destructors stop and join them while everything above is still alive.
  std::vector<std::jthread> workers_;
};

}  // namespace castor
