#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <thread>

#include "core/mutex.h"

namespace castor {

/// A thread that takes cores which have nothing else to do (SCHED_IDLE; as any other where the
/// system refuses that): for work that what else the process does shall not wait for. Such a thread
/// may stand still for as long as others keep all cores busy, so it is to hold no lock. One thread
/// gives it work.
class IdleThread {
 public:
  /// Throws std::system_error where no thread is to be had.
  IdleThread();
  ~IdleThread() = default;  ///< Not in a forked child, where the thread that it waits for is not.
  IdleThread(const IdleThread&) = delete;
  IdleThread& operator=(const IdleThread&) = delete;

  /// Runs `work` there; returns when it is over, and rethrows what it throws.
  void run(const std::function<void()>& work);

  /// Processor time of all work so far.
  [[nodiscard]] double seconds() const;

  /// From now on where_idle() of the calling thread is run() of `thread`, until it is told of
  /// another one; nullptr: of none.
  static void prefer(IdleThread* thread) noexcept;

 private:
  void serve(const std::stop_token& stop);

  mutable Mutex mutex_;
  std::condition_variable_any given_;
  std::condition_variable done_;
  const std::function<void()>* work_ CASTOR_GUARDED_BY(mutex_) = nullptr;
  std::exception_ptr error_ CASTOR_GUARDED_BY(mutex_);
  double seconds_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::jthread thread_;
};

/// Runs `work`, which takes no lock, on the idle thread that the calling thread prefers, or on that
/// itself where it prefers none.
void where_idle(const std::function<void()>& work);

}  // namespace castor
