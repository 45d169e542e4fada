#pragma once

#include <functional>
#include <string>
#include <utility>

#include "core/mutex.h"
#include "core/run_load.h"

namespace castor {

/// Whether weights and optimizer states are those of one step. A step that fails when it has
/// changed some chunks leaves a mixture of two, and so does a load that fails half-way; a mixture
/// must be neither trained further nor saved. Thread-safe.
class RunIntegrity {
 public:
  /// broke() calls `then`, on its own thread. To be set before it can be called.
  void when_broken(std::function<void()> then) { then_ = std::move(then); }
  /// `why`: "optimizer.step() failed when it had changed 3 of 12 chunks (...)".
  void broke(const std::string& why);
  /// A load has begun to replace them.
  void loading(RunLoad load);
  /// All of them were replaced by a checkpoint's.
  void loaded(RunLoad load);
  [[nodiscard]] bool whole() const;
  /// Throws UsageError unless whole().
  void check() const;

 private:
  std::function<void()> then_;
  mutable Mutex mutex_;
  std::string weights_lost_ CASTOR_GUARDED_BY(mutex_);  // why; empty: they are whole
  std::string states_lost_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
