#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/mutex.h"
#include "core/runtime.h"

namespace castor {

/// Which forward and backward passes of a model are under way, and for how long what their thread
/// allocates on the CPU is the model's. Owned by the session; used by the one thread at a time that
/// runs forward and backward. A thread of autograd's may tell that a pass is over, also late.
class Passes : public std::enable_shared_from_this<Passes> {
 public:
  /// `charged`: the account of what passes allocate on the CPU; nullptr: there is none. `runtime`
  /// outlives this.
  Passes(const Runtime& runtime, std::shared_ptr<NonModelMemory> charged)
      : runtime_(runtime), charged_(std::move(charged)) {}

  /// `work` runs at the end of each backward pass that follows_backward and did not fail, within
  /// it; passes within others do not count.
  void at_backward_end(std::function<void()> work) { at_backward_end_ = std::move(work); }

  /// Before a module's forward.
  void begin_forward();
  /// After a module's forward; no backward will follow one without gradients ...
  void end_forward();
  /// ... or one that failed, or has no result, unless it runs in a backward pass.
  void stop_charging();
  /// Something of the model happens in a backward pass, if one is under way, which is followed
  /// until it ends. Returns whether one is.
  bool follow_backward();
  void begin_backward();
  /// The step is over: what the thread allocates is its own.
  void end_step();

  /// Whether the backward pass under way is within another one, as a reentrant checkpoint's is.
  [[nodiscard]] bool nested() const;
  /// Whether a forward with gradients runs a part without: a reentrant checkpoint's segment, which
  /// will have a backward pass of its own.
  [[nodiscard]] bool in_segment() const;

 private:
  class End;
  void backward_done(int pass);
  void backward_ended(int pass);

  const Runtime& runtime_;
  const std::shared_ptr<NonModelMemory> charged_;
  std::function<void()> at_backward_end_;
  std::shared_ptr<NonModelMemory> account_before_;  // of the thread, while inference runs
  bool forward_trains_ = false;  // the outermost module was entered with gradients on
  mutable Mutex mutex_;
  // Passes under way, as autograd numbers them; nested ones last.
  std::vector<int> backward_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
