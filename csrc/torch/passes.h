#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/pass_turn.h"
#include "core/runtime.h"

namespace castor {

/// Which forward and backward passes of a model are under way, and for how long what their thread
/// allocates on the CPU is the model's. Owned by the session. Any thread may begin a pass: it waits
/// for its turn (PassTurn), and throws UsageError as that does. Until the pass is over, all else is
/// the turn's owner's to call. A thread of autograd's may tell that a pass is over, also late.
class Passes : public std::enable_shared_from_this<Passes> {
 public:
  /// `charged`: the account of what passes allocate on the CPU; nullptr: there is none. `runtime`
  /// outlives this.
  Passes(const Runtime& runtime, std::shared_ptr<NonModelMemory> charged);

  /// `work` runs at the end of each backward pass that follows_backward and did not fail, within
  /// it; passes within others do not count.
  void at_backward_end(std::function<void()> work) { at_backward_end_ = std::move(work); }

  /// The state of a pass that a caller has joined.
  using Joined = PassTurn::Joined;

  /// Before a module's forward, in a backward pass or outside: returns once it may run.
  Joined begin_forward();
  /// After a module's forward, or where what came behind begin_forward has failed. `outermost`: no
  /// module is under way any more; no backward will follow one without gradients ...
  void end_forward(bool outermost);
  /// ... or one that failed, or has no result, unless it runs in a backward pass.
  void stop_charging();
  /// Something of the model happens in a backward pass, if one is under way, which is followed
  /// until it ends. `origin`: of the graph that it goes over.
  Joined follow_backward(PassTurn::Origin origin = {});
  Joined begin_backward(PassTurn::Origin origin);
  /// A section of the calling thread's own, until end_section.
  Joined begin_section(PassTurn::Section kind, const std::string& what);
  void end_section(PassTurn::Section kind) { turn_.end_section(kind); }
  /// The step is over: what the thread allocates is its own.
  void end_step();

  /// Whether the calling thread has the turn.
  [[nodiscard]] bool mine() const;
  [[nodiscard]] PassTurn& turn() noexcept { return turn_; }
  [[nodiscard]] const PassTurn& turn() const noexcept { return turn_; }
  /// Whether a forward with gradients runs a part without: a reentrant checkpoint's segment, which
  /// will have a backward pass of its own.
  [[nodiscard]] bool in_segment() const;

 private:
  class End;
  [[nodiscard]] static PassTurn::Caller caller();
  void follow(const Joined& joined);
  void backward_done(int pass);
  void backward_ended(int pass);

  const Runtime& runtime_;
  const std::shared_ptr<NonModelMemory> charged_;
  std::function<void()> at_backward_end_;
  std::shared_ptr<NonModelMemory> account_before_;  // of the thread, while inference runs
  bool forward_trains_ = false;  // the outermost module was entered with gradients on
  PassTurn turn_;
};

}  // namespace castor
