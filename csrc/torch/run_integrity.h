#pragma once

#include <mutex>
#include <string>

#include "core/error.h"

namespace castor {

/// Whether weights and optimizer states are those of one step. A step that fails when it has
/// changed some chunks leaves a mixture of two, and so does a load that fails half-way; a mixture
/// must be neither trained further nor saved. Thread-safe.
class RunIntegrity {
 public:
  /// `why`: "optimizer.step() failed when it had updated 3 of 12 chunks: ...".
  void broke(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (weights_lost_.empty()) {
      weights_lost_ = why;
    }
    if (states_lost_.empty()) {
      states_lost_ = why;
    }
  }
  /// A load has begun to replace them.
  void loading(bool weights, bool states) {
    const std::lock_guard lock(mutex_);
    if (weights && weights_lost_.empty()) {
      weights_lost_ = "a load of the weights did not come to its end";
    }
    if (states && states_lost_.empty()) {
      states_lost_ = "a load of the optimizer states did not come to its end";
    }
  }
  /// All of them were replaced by a checkpoint's.
  void loaded(bool weights, bool states) {
    const std::lock_guard lock(mutex_);
    if (weights) {
      weights_lost_.clear();
    }
    if (states) {
      states_lost_.clear();
    }
  }
  [[nodiscard]] bool whole() const {
    const std::lock_guard lock(mutex_);
    return weights_lost_.empty() && states_lost_.empty();
  }
  /// Throws UsageError unless whole().
  void check() const {
    const std::lock_guard lock(mutex_);
    const std::string& why = weights_lost_.empty() ? states_lost_ : weights_lost_;
    if (!why.empty()) {
      throw UsageError(
          "this run cannot go on, and cannot be saved: " + why + ". " +
          (weights_lost_.empty()  ? "The optimizer states belong"
           : states_lost_.empty() ? "The weights belong"
                                  : "Weights and optimizer states belong") +
          " to no single step; load the last checkpoint, with model and optimizer (booster.load)");
    }
  }

 private:
  mutable std::mutex mutex_;  // guards everything below
  std::string weights_lost_;  // why; empty: they are whole
  std::string states_lost_;
};

}  // namespace castor
