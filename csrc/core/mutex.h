#pragma once

#include <mutex>

// Annotations that say which mutex guards what. Clang's thread-safety analysis checks them (`make
// lint-threads`); other compilers ignore them. Constructors and destructors are not checked.
#if defined(__clang__)
#define CASTOR_THREAD_ATTRIBUTE(attribute) __attribute__((attribute))
#else
#define CASTOR_THREAD_ATTRIBUTE(attribute)
#endif
/// Marks a member that is read and written only while the mutex is held.
#define CASTOR_GUARDED_BY(mutex) CASTOR_THREAD_ATTRIBUTE(guarded_by(mutex))
/// Marks a function, or a lambda, that is called only while the mutex is held.
#define CASTOR_REQUIRES(mutex) CASTOR_THREAD_ATTRIBUTE(requires_capability(mutex))
/// Marks a function that calls a function it was given: the analysis does not see what the latter
/// requires.
#define CASTOR_NOT_ANALYZED CASTOR_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace castor {

/// A std::mutex that the analysis knows. Taken by MutexLock.
class CASTOR_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// Lock that holds a mutex while it lives, except between unlock() and lock().
class CASTOR_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) CASTOR_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~MutexLock() CASTOR_THREAD_ATTRIBUTE(release_capability()) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() CASTOR_THREAD_ATTRIBUTE(acquire_capability()) CASTOR_NOT_ANALYZED { lock_.lock(); }
  void unlock() CASTOR_THREAD_ATTRIBUTE(release_capability()) CASTOR_NOT_ANALYZED {
    lock_.unlock();
  }
  /// Returns the lock for condition variables, whose predicates are lambdas with CASTOR_REQUIRES.
  [[nodiscard]] std::unique_lock<std::mutex>& native() noexcept { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace castor
