#pragma once

#include <mutex>

// Which mutex guards what, checked by clang's thread-safety analysis (`make lint-threads`); other
// compilers see nothing of it. Constructors and destructors are not checked.
#if defined(__clang__)
#define CASTOR_THREAD_ATTRIBUTE(attribute) __attribute__((attribute))
#else
#define CASTOR_THREAD_ATTRIBUTE(attribute)
#endif
/// A member that is read and written only while the mutex is held.
#define CASTOR_GUARDED_BY(mutex) CASTOR_THREAD_ATTRIBUTE(guarded_by(mutex))
/// A function, or a lambda, that is called only while the mutex is held.
#define CASTOR_REQUIRES(mutex) CASTOR_THREAD_ATTRIBUTE(requires_capability(mutex))
/// One that takes the mutex, so that its caller must not hold it.
#define CASTOR_EXCLUDES(mutex) CASTOR_THREAD_ATTRIBUTE(locks_excluded(mutex))
/// A mutex that is taken before another one.
#define CASTOR_ACQUIRED_BEFORE(mutex) CASTOR_THREAD_ATTRIBUTE(acquired_before(mutex))

namespace castor {

/// std::mutex, as the analysis knows it. Taken by MutexLock.
class CASTOR_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// Holds a mutex while it lives, but for what runs between unlock() and lock().
class CASTOR_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) CASTOR_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~MutexLock() CASTOR_THREAD_ATTRIBUTE(release_capability()) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() CASTOR_THREAD_ATTRIBUTE(acquire_capability())
      CASTOR_THREAD_ATTRIBUTE(no_thread_safety_analysis) {
    lock_.lock();
  }
  void unlock() CASTOR_THREAD_ATTRIBUTE(release_capability())
      CASTOR_THREAD_ATTRIBUTE(no_thread_safety_analysis) {
    lock_.unlock();
  }
  /// For condition variables, whose predicates are lambdas with CASTOR_REQUIRES.
  [[nodiscard]] std::unique_lock<std::mutex>& native() noexcept { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace castor
