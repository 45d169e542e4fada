#pragma once

#include <algorithm>
#include <vector>

#include "core/mutex.h"

namespace castor {

class Runtime;

/// The runtimes of the models that take from one device budget. They share one mutex: to make room
/// for one, chunks of the others leave, and no lock of theirs is waited for under its own. Owned by
/// them together; a runtime joins when it is made and leaves before it goes.
class RuntimeGroup {
 public:
  RuntimeGroup() = default;
  RuntimeGroup(const RuntimeGroup&) = delete;
  RuntimeGroup& operator=(const RuntimeGroup&) = delete;

  [[nodiscard]] Mutex& mutex() noexcept { return mutex_; }

  // With the mutex held.
  void join(Runtime* runtime) { members_.push_back(runtime); }
  void leave(Runtime* runtime) { std::erase(members_, runtime); }
  /// A module of it is entered.
  void used(Runtime* runtime) {
    if (members_.back() != runtime) {
      leave(runtime);
      members_.push_back(runtime);
    }
  }
  /// The one used last comes last.
  [[nodiscard]] const std::vector<Runtime*>& members() const noexcept { return members_; }

 private:
  Mutex mutex_;
  std::vector<Runtime*> members_;
};

}  // namespace castor
