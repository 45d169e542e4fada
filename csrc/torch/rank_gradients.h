#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/collectives.h"
#include "core/memory_tier.h"
#include "core/mutex.h"
#include "core/rank_meeting.h"
#include "core/shard_map.h"
#include "dist/backward_reductions.h"
#include "dist/device_staging.h"
#include "dist/rank_figures.h"
#include "dist/rank_reduction.h"
#include "torch/gradient_parts.h"
#include "torch/gradient_sink.h"
#include "torch/tensor_gate.h"

namespace castor {

/// Makes the gradients of several ranks their mean, on every rank: at the end of a backward pass,
/// or later where passes are not to be synchronised, but before the step.
///
/// Where ranks share the gradients' homes, a chunk is reduced beside backward as soon as every rank
/// has completed it (ZeRO-2, Rajbhandari et al. 2020, section 5.2, over chunks). Until then this
/// rank has a copy of its own, which the host's budget pays for; when a few chunks wait for ranks
/// that are slower, so does backward, but not for long: then the copies may become more.
///
/// So it is where each rank keeps its part of the mean (GradientParts).
///
/// Owned by the session; used by the one thread at a time that runs backward and step.
class RankGradients {
 public:
  /// Where gradients are.
  struct Places {
    GradientSink& sink;
    const SharedHomes* homes;  ///< that ranks share; nullptr: there are none
    GradientParts* parts;      ///< nullptr: none are in parts
    const ShardMap& shards;    ///< ... and how those are cut
    DeviceStaging staging;     ///< of those on a device
  };
  /// Takes windows from `host`, and throws OutOfMemory. All but `ranks` outlive this.
  RankGradients(std::shared_ptr<Collectives> ranks, RankMeeting& meeting, const ChunkLayout& layout,
                Places places, Executor& executor, MemoryTier& host);

  /// Whether the passes that follow are synchronised at their end; returns whether those before
  /// were.
  bool synchronise(bool on) noexcept { return std::exchange(synchronised_, on); }
  /// A gradient is about to go into the chunk's payload. Throws OutOfMemory; Error where it is
  /// added to parts of a rank that is gone.
  void arriving(ChunkId chunk, TensorGate& gate);
  /// Somebody else is about to write the chunk's gradients. Throws OutOfMemory. From any thread.
  void writing(ChunkId chunk) {
    if (at_shared_home(chunk)) {
      take_copy(chunk);
    }
  }
  /// This rank is about to write all gradients there are. Throws OutOfMemory, and has taken nothing
  /// then.
  void writing_all();
  /// Whether this rank has a copy of the chunk's gradients as soon as somebody writes them.
  [[nodiscard]] bool at_shared_home(ChunkId chunk) const;
  /// The pass under way brings no more gradients of the chunk, which has all of them.
  void completed(ChunkId chunk, TensorGate& gate);
  /// Returns when the chunk's gradients are not being reduced.
  void wait(ChunkId chunk);
  /// The outermost backward pass is over.
  void end_backward(TensorGate& gate);
  /// Before a step, which may not be taken with gradients that the others do not have.
  /// `optimizer`: which steps, of several.
  void begin_step(std::optional<std::size_t> optimizer, TensorGate& gate) {
    average(MeetingPoint::kStep, gate, optimizer);
  }
  void end_step() noexcept { meeting_.end_step(); }
  /// Adds the squares of gradients that are in parts, at each parameter's place. Collective.
  void measure_parts(std::span<double> squares);
  /// From any thread.
  void leave() noexcept { ranks_->leave(); }

  [[nodiscard]] const RankFigures& figures() const noexcept { return figures_; }

 private:
  [[nodiscard]] bool cut(ChunkId chunk) const { return parts_ != nullptr && parts_->cut(chunk); }
  // Whether this rank has a copy of the chunk's gradients until they are reduced.
  [[nodiscard]] bool copied(ChunkId chunk) const { return cut(chunk) || at_shared_home(chunk); }
  // Of a chunk's gradients, by this rank.
  void take_copy(ChunkId chunk);
  [[nodiscard]] bool has_copy(ChunkId chunk);  // that is whole, not a part
  [[nodiscard]] Reservation pay_for_copy(ChunkId chunk);
  void drop_copy(ChunkId chunk);
  void forget_last_step(TensorGate& gate);
  void reduce(ChunkId chunk);
  void average(MeetingPoint point, TensorGate& gate, std::optional<std::size_t> optimizer = {});
  [[nodiscard]] GradientMarks meet(MeetingPoint point, std::optional<std::size_t> optimizer);

  const std::shared_ptr<Collectives> ranks_;
  RankMeeting& meeting_;
  const ChunkLayout& layout_;
  GradientSink& gradients_;
  const SharedHomes* const homes_;
  GradientParts* const parts_;
  const ShardMap& shards_;
  Executor& executor_;
  MemoryTier& host_;
  RankFigures figures_;
  RankReduction reduction_;
  bool synchronised_ = true;
  bool begun_ = false;        // a pass
  bool patient_ = true;       // in this pass: others are expected to come soon
  std::vector<bool> handed_;  // per chunk: in this pass, to reductions_
  Mutex mutex_;
  std::vector<Reservation> copies_ CASTOR_GUARDED_BY(mutex_);  // per chunk
  std::unique_ptr<BackwardReductions> reductions_;  // nullptr: all is whole on every rank
};

}  // namespace castor
