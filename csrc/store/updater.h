#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/mutex.h"
#include "core/overlap.h"
#include "core/runtime.h"
#include "parallel/update_queue.h"
#include "store/chunk_gradients.h"
#include "store/chunk_updates.h"
#include "store/operator_gate.h"
#include "store/run_integrity.h"
#include "store/session_device.h"

namespace castor {

/// Options of the parameter groups for their updates: `groups[group_of[i]]` are parameter i's.
struct GroupOptions {
  static constexpr std::int64_t kNoGroup = -1;  ///< the parameter is not updated

  std::vector<RuleOptions> groups;
  std::vector<std::int64_t> group_of;

  [[nodiscard]] bool has(ParamId param) const { return group_of[index(param)] != kNoGroup; }
  /// Returns the parameter's options. Requires that it has a group.
  [[nodiscard]] const RuleOptions& of(ParamId param) const {
    return groups[static_cast<std::size_t>(group_of[index(param)])];
  }
};

/// Schedule of the updates of chunks: in step(), beside what follows it, or in backward
/// (core/overlap.h). Counts the steps of each parameter. Owned by the session. One thread at a
/// time runs backward and step; wait(), updated() and the checks may be called from any thread.
class Updater {
 public:
  /// Objects that the updater works on. All outlive it.
  struct Parts {
    const ChunkLayout& layout;
    ChunkUpdates& updates;
    StateStore& places;
    ChunkGradients& gradients;
    Runtime& runtime;
    OperatorGate& gate;
    RunIntegrity& integrity;
    CopyEngine& copies;
    const SessionDevice& device;
    UpdateQueue* queue;  ///< runs updates beside the caller; nullptr with Overlap::kNone
    /// Returns the place of the steps that a parameter's states have taken
    /// (UpdateRule::steps_states).
    std::function<float&(ParamId)> steps;
    /// Called when a parameter has got a new value, or is about to get one.
    std::function<void(ParamId)> replaced;
  };
  /// `aliased` tells whether somebody holds a tensor over a chunk's memory that the gate does not
  /// watch.
  Updater(const Parts& parts, Overlap overlap, std::function<bool(ChunkId)> aliased);

  /// Sets the options with which the coming backward updates what it completes, with
  /// Overlap::kBackward; no effect in other modes. step() has to be given the same options.
  void arm(GroupOptions options);
  /// Notes that the chunk's gradients are complete: if armed, updates the chunk when no module
  /// needs it any more.
  void completed(ChunkId chunk);
  /// Updates the chunks that are complete and that no module needs any more.
  void update_completed();
  /// Forgets the completed chunks that backward has not updated: step() has begun, and updates
  /// them.
  void forget_completed() { completed_.clear(); }
  /// Updates the parameters that have a group and a gradient and were not updated in backward. With
  /// Overlap::kForward the updates may still be under way on return. If it throws, either nothing
  /// has changed or the run counts as broken.
  void step(const GroupOptions& options, double grad_scale);
  /// Returns whether this step's backward has updated the chunk.
  [[nodiscard]] bool updated(ChunkId chunk) const {
    if (!any_updated()) {
      return false;
    }
    const MutexLock lock(mutex_);
    return updated_[index(chunk)];
  }
  /// Returns whether this step's backward updates what it completes.
  [[nodiscard]] bool armed() const noexcept { return !armed_.groups.empty(); }
  [[nodiscard]] bool any_updated() const noexcept {
    return any_updated_.load(std::memory_order_acquire);
  }
  /// Throws UsageError if backward has updated any chunk: `what` came between backward and step().
  void check_none_updated(const std::string& what) const;
  /// Throws UsageError if backward has updated a chunk that the module needs.
  void check_not_updated(ModuleId module) const;

  /// Waits until the chunk's update is over; rethrows the error that stopped it.
  void wait(ChunkId chunk);
  /// Waits until every update is over and its states are on NVMe; rethrows the error that stopped
  /// one.
  void wait_for_all();
  /// Ends the step and its updates, and forgets failures: a load replaces the results.
  void abandon();

 private:
  /// Resets what is kept for one step, when that is over or given up.
  void end_step();
  void check(const GroupOptions& options) const;
  void check_used_gradient(ParamId param, const GroupOptions& options) const;
  [[nodiscard]] ParamUpdate next_update(ParamId param, const RuleOptions& options,
                                        double grad_scale) const;
  void count(std::span<const ParamUpdate> updates);
  void run_now(std::span<const std::vector<ParamUpdate>> updates);
  void submit(ChunkId chunk, const std::vector<ParamUpdate>& updates);
  /// Waits for the submitted update of a chunk, if aliased_().
  void await_aliased(ChunkId chunk);

  const Parts parts_;
  const Overlap overlap_;
  const std::function<bool(ChunkId)> aliased_;
  GroupOptions armed_;              // no groups: nothing is updated before step()
  std::vector<ChunkId> completed_;  // gradients complete, update not submitted
  mutable Mutex mutex_;             // no other mutex is taken while it is held
  // Per chunk, in this step's backward.
  std::vector<bool> updated_ CASTOR_GUARDED_BY(mutex_);
  // Whether any is; written under the mutex. Most steps update nothing in backward, and every
  // module event asks.
  std::atomic<bool> any_updated_{false};
};

}  // namespace castor
