#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/nonmodel_memory.h"
#include "core/pass_turn.h"
#include "core/runtime.h"

namespace castor {

/// Autograd, as passes know it: what it does on the calling thread.
class Autograd {
 public:
  virtual ~Autograd() = default;
  [[nodiscard]] virtual PassTurn::Caller caller() const = 0;
  /// Returns whether a forward now prepares a backward.
  [[nodiscard]] virtual bool records() const = 0;
  /// Calls `reached` at the end of the backward pass under way; never where the pass fails. Drops
  /// `reached` with the pass in both cases, also late and on another thread.
  virtual void at_end(std::function<void()> reached) const = 0;
};

/// Record of a model's forward and backward passes under way. It also says how long the CPU
/// allocations of their thread are charged to the model. Owned by the session. Any thread may begin
/// a pass: it waits for its turn (PassTurn), and throws UsageError as PassTurn does. Until the pass
/// is over, only the owner of the turn may call the other functions. A thread of autograd's may
/// tell that a pass is over, also late.
class Passes : public std::enable_shared_from_this<Passes> {
 public:
  /// Begins with no pass under way. `charged`: account of what passes allocate on the CPU; nullptr:
  /// there is none. `runtime` outlives this.
  Passes(const Runtime& runtime, std::shared_ptr<NonModelMemory> charged,
         std::unique_ptr<Autograd> autograd);

  /// Sets `work` to run at the end of each backward pass that is followed (follow_backward) and did
  /// not fail, within that pass. Passes within others do not count.
  void at_backward_end(std::function<void()> work) { at_backward_end_ = std::move(work); }

  /// State of a pass that a caller has joined.
  using Joined = PassTurn::Joined;

  /// Waits until a module's forward may run. Called before the forward, in a backward pass or
  /// outside.
  Joined begin_forward();
  /// Ends a module's forward, or what began with begin_forward() and has failed. `outermost`: no
  /// module is under way any more. No backward will follow a forward without gradients: its end
  /// also stops charging the thread's allocations to the model.
  void end_forward(bool outermost);
  /// Stops charging the thread's allocations to the model after a forward that failed or has no
  /// result, which no backward will follow either. No effect within a pass that goes on.
  void stop_charging();
  /// Notes that something of the model happens in a backward pass, if one is under way, and follows
  /// that pass until it ends. `origin`: origin of the graph that the pass goes over.
  Joined follow_backward(PassTurn::Origin origin = {});
  Joined begin_backward(PassTurn::Origin origin);
  /// Begins a section of the calling thread's own, which lasts until end_section().
  Joined begin_section(PassTurn::Section kind, const std::string& what);
  void end_section(PassTurn::Section kind) { turn_.end_section(kind); }
  /// Makes the ends of passes under way no events any more: the session ends, or this is a forked
  /// child.
  void abandon() noexcept { abandoned_ = true; }
  /// Ends the step: what the thread allocates from now on is its own.
  void end_step();

  /// Returns whether the calling thread has the turn.
  [[nodiscard]] bool mine() const;
  [[nodiscard]] PassTurn& turn() noexcept { return turn_; }
  [[nodiscard]] const PassTurn& turn() const noexcept { return turn_; }
  /// Returns whether a forward with gradients runs a part without: a segment of a reentrant
  /// checkpoint, which will have a backward pass of its own.
  [[nodiscard]] bool in_segment() const;

 private:
  class End;
  void follow(const Joined& joined);
  void backward_done(int pass);
  void backward_ended(int pass);

  const Runtime& runtime_;
  const std::shared_ptr<NonModelMemory> charged_;
  const std::unique_ptr<Autograd> autograd_;
  std::function<void()> at_backward_end_;
  std::shared_ptr<NonModelMemory> account_before_;  // of the thread, while inference runs
  bool forward_trains_ = false;  // the outermost module was entered with gradients on
  std::atomic<bool> abandoned_ = false;
  PassTurn turn_;
};

}  // namespace castor
