#pragma once

#include <ATen/core/Tensor.h>

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
#include "torch/chunk_updates.h"
#include "torch/gradient_sink.h"
#include "torch/run_integrity.h"
#include "torch/session_device.h"
#include "torch/tensor_gate.h"

namespace castor {

/// What parameter groups ask of their updates: `groups[group_of[i]]` are parameter i's options.
struct GroupOptions {
  static constexpr std::int64_t kNoGroup = -1;  ///< it is not updated

  std::vector<RuleOptions> groups;
  std::vector<std::int64_t> group_of;

  [[nodiscard]] bool has(ParamId param) const { return group_of[index(param)] != kNoGroup; }
  /// Requires that it has a group.
  [[nodiscard]] const RuleOptions& of(ParamId param) const {
    return groups[static_cast<std::size_t>(group_of[index(param)])];
  }
};

/// When chunks are updated: in step(), beside what follows it, or in backward (core/overlap.h); and
/// which step each parameter is in. Owned by the session. One thread at a time runs backward and
/// step; wait(), updated() and the checks may be called from any.
class Updater {
 public:
  /// What it works on. All outlive the updater.
  struct Parts {
    const ChunkLayout& layout;
    std::span<const ParamHandle> params;
    ChunkUpdates& updates;
    StatePlaces& places;
    GradientSink& gradients;
    Runtime& runtime;
    TensorGate& gate;
    RunIntegrity& integrity;
    CopyEngine& copies;
    const SessionDevice& device;
    UpdateQueue* queue;  ///< what runs beside the caller; nullptr with Overlap::kNone
  };
  /// `aliased`: whether somebody holds a tensor over a chunk's memory that the gate does not watch.
  Updater(const Parts& parts, Overlap overlap, std::function<bool(ChunkId)> aliased);

  /// Steps that the states have taken (UpdateRule::steps_states), one float32 per parameter: views
  /// of it are torch's `step` entries.
  [[nodiscard]] const at::Tensor& steps() const noexcept { return steps_; }

  /// Overlap::kBackward: the options with which the coming backward updates what it completes; no
  /// effect in other modes. As in step, which has to be given the same.
  void arm(GroupOptions options);
  /// The chunk's gradients are complete: if armed, it is updated when no module needs it any more.
  void completed(ChunkId chunk);
  /// Updates what has been completed, and no module needs any more.
  void update_completed();
  /// step() has begun: it updates what backward has not.
  void forget_completed() { completed_.clear(); }
  /// Updates the parameters that have a group and a gradient and were not updated in backward. With
  /// Overlap::kForward it may still be under way on return. If it throws, nothing has moved, or the
  /// run counts as broken.
  void step(const GroupOptions& options, double grad_scale);
  /// Whether this step's backward has updated the chunk.
  [[nodiscard]] bool updated(ChunkId chunk) const {
    const MutexLock lock(mutex_);
    return updated_[index(chunk)];
  }
  /// Whether this step's backward updates what it completes.
  [[nodiscard]] bool armed() const noexcept { return !armed_.groups.empty(); }
  [[nodiscard]] bool any_updated() const;
  /// Throws UsageError where backward has updated chunks: `what` came between it and step().
  void check_none_updated(const std::string& what) const;
  /// ... chunks that the module needs.
  void check_not_updated(ModuleId module) const;

  /// Returns when the chunk's update is over; rethrows what stopped it.
  void wait(ChunkId chunk);
  /// ... every update, and its states are on NVMe.
  void wait_for_all();
  /// Forgets what failed: a load replaces it.
  void abandon();

 private:
  /// The step is over, or given up.
  void end_step();
  void check(const GroupOptions& options) const;
  void check_used_gradient(ParamId param, const GroupOptions& options) const;
  [[nodiscard]] ParamUpdate next_update(ParamId param, const RuleOptions& options,
                                        double grad_scale) const;
  void count(std::span<const ParamUpdate> updates);
  void run_now(std::span<const std::vector<ParamUpdate>> updates);
  void submit(ChunkId chunk, const std::vector<ParamUpdate>& updates);
  void await_aliased(ChunkId chunk);  ///< whose update has been submitted

  const Parts parts_;
  const Overlap overlap_;
  const std::function<bool(ChunkId)> aliased_;
  at::Tensor steps_;
  GroupOptions armed_;              // no groups: nothing is updated before step()
  std::vector<ChunkId> completed_;  // gradients complete, update not submitted
  mutable Mutex mutex_;             // nothing else is taken while it is held
  // Per chunk, in this step's backward.
  std::vector<bool> updated_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
