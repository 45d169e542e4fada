#pragma once

#include <algorithm>
#include <vector>

#include "core/mutex.h"

namespace castor {

class Runtime;

/// Runtimes of the models that take from one device budget. They share one mutex: to make room for
/// one model, chunks of the others leave, and no runtime waits for a lock of another one under its
/// own. Owned by the runtimes together; a runtime joins when it is made and leaves before it is
/// destroyed.
class RuntimeGroup {
 public:
  RuntimeGroup() = default;
  RuntimeGroup(const RuntimeGroup&) = delete;
  RuntimeGroup& operator=(const RuntimeGroup&) = delete;

  [[nodiscard]] Mutex& mutex() noexcept { return mutex_; }

  // The functions below are called with the mutex held.
  void join(Runtime* runtime) { members_.push_back(runtime); }
  void leave(Runtime* runtime) { std::erase(members_, runtime); }
  /// Notes that a module of the runtime is entered.
  void used(Runtime* runtime) {
    if (members_.back() != runtime) {
      leave(runtime);
      members_.push_back(runtime);
    }
  }
  /// Returns the members; the one used last comes last.
  [[nodiscard]] const std::vector<Runtime*>& members() const noexcept { return members_; }

 private:
  Mutex mutex_;
  std::vector<Runtime*> members_;
};

}  // namespace castor
