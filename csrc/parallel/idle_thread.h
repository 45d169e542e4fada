#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <thread>

#include "core/mutex.h"

namespace castor {

/// A thread that runs only on cores with nothing else to do (SCHED_IDLE; an ordinary thread where
/// the system refuses that). It is for work that the rest of the process shall not wait for. Such a
/// thread may stand still for as long as others keep all cores busy, so its work must hold no lock.
/// One thread gives it work.
class IdleThread {
 public:
  /// Starts the thread. Throws std::system_error where the system refuses one.
  IdleThread();
  /// Waits for the thread. Must not run in a forked child, where the thread does not exist.
  ~IdleThread() = default;
  IdleThread(const IdleThread&) = delete;
  IdleThread& operator=(const IdleThread&) = delete;

  /// Runs `work` on the thread; returns when it is over, and rethrows its exception.
  void run(const std::function<void()>& work);

  /// Returns the processor time of all work so far, in seconds.
  [[nodiscard]] double seconds() const;

  /// Makes where_idle() of the calling thread run work on `thread`, until the next call; with
  /// nullptr, on the calling thread itself.
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

/// Runs `work`, which takes no lock, on the idle thread that the calling thread prefers. Where it
/// prefers none, runs the work on the calling thread.
void where_idle(const std::function<void()>& work);

}  // namespace castor
