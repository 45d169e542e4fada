#pragma once

#include <Python.h>

namespace castor {

/// Scope without Python's global lock: this thread gives the lock up, if it holds it, until the end
/// of the scope. Code that may wait for a mutex of castor's, or for a copy or an update, does so in
/// such a scope. Under such a mutex tensors that Python knows may be dropped, which takes the lock.
/// The mutexes that destructors of tensors take while they hold the lock are leaves: nothing else
/// is waited for under them.
class GilRelease {
 public:
  GilRelease() noexcept
      : state_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {
  }
  ~GilRelease() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace castor
