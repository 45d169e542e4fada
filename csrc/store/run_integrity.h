#pragma once

#include <functional>
#include <string>
#include <utility>

#include "core/mutex.h"
#include "core/run_load.h"

namespace castor {

/// Record of whether weights and optimizer states are those of one step. A step that fails after it
/// has changed some chunks leaves a mixture of two steps, and so does a load that fails half-way. A
/// mixture must be neither trained further nor saved. Thread-safe.
class RunIntegrity {
 public:
  /// Sets the function that broke() calls, on broke()'s own thread. To be set before broke() can be
  /// called.
  void when_broken(std::function<void()> then) { then_ = std::move(then); }
  /// Records that the run is broken. `why`: "optimizer.step() failed when it had changed 3 of 12
  /// chunks (...)".
  void broke(const std::string& why);
  /// Records that a load has begun to replace the values that `load` names.
  void loading(RunLoad load);
  /// Records that a checkpoint's values have replaced all that `load` names.
  void loaded(RunLoad load);
  [[nodiscard]] bool consistent() const;
  /// Throws UsageError unless consistent().
  void check() const;

 private:
  std::function<void()> then_;
  mutable Mutex mutex_;
  std::string weights_lost_ CASTOR_GUARDED_BY(mutex_);  // the reason; empty: none are lost
  std::string states_lost_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
