#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/collectives.h"
#include "core/consistency_check.h"
#include "core/memory_tier.h"
#include "core/mutex.h"
#include "core/shard_map.h"
#include "ranks/backward_reductions.h"
#include "ranks/device_staging.h"
#include "ranks/rank_figures.h"
#include "ranks/rank_reduction.h"
#include "store/chunk_gradients.h"
#include "store/device_gradients.h"
#include "store/gradient_shards.h"
#include "store/operator_gate.h"

namespace castor {

/// Reduction of the gradients of several ranks to their mean, on every rank. It runs at the end of
/// a backward pass, or later where passes are not to be synchronised, but before the step.
///
/// If ranks share the host storage of gradients, a chunk is reduced beside backward as soon as
/// every rank has completed it (ZeRO-2, Rajbhandari et al. 2020, section 5.2, over chunks). Until
/// then this rank has a full copy of its own, which the host's budget pays for. When a few chunks
/// wait for slower ranks, backward waits as well, but not for long: then it takes more copies while
/// the host has room for them, and where it has none, waits until the others free one.
///
/// The same holds if each rank keeps its shard of the mean (GradientShards), and, without a copy,
/// where devices reduce gradients (DeviceReduction): for chunks on the device, and for streamed
/// chunks, whose gradients gather on the device until then (DeviceGradients). Those of a streamed
/// chunk take the way through the host where p.grad has gradients before the pass, where several
/// passes bring them, where no buffer is free, and where somebody reads p.grad before all ranks
/// have theirs.
///
/// Owned by the session; used by the one thread at a time that runs backward and step.
class RankGradients {
 public:
  /// Places of the gradients.
  struct Places {
    ChunkGradients& gradients;
    const SharedHostStorage* storage;  ///< host storage that ranks share; nullptr: there is none
    GradientShards* gradient_shards;   ///< sharded gradients; nullptr: there are none
    const ShardMap& shards;            ///< map of those shards
    DeviceStaging staging;             ///< staging buffers of gradients on a device
    /// Copies of gradients that gather on the device; nullptr where the host addresses its memory.
    std::shared_ptr<CopyEngine> copies;
  };
  /// Takes windows from `host`, and from `device` where `sums` adds up; nullptr: the host does, in
  /// rank order. Throws OutOfMemory. All arguments but `ranks` and `sums` outlive this.
  RankGradients(std::shared_ptr<Collectives> ranks, std::shared_ptr<DeviceReduction> sums,
                ConsistencyCheck& consistency, const ChunkLayout& layout, Places places,
                Executor& executor, MemoryTier& host, MemoryTier& device);
  ~RankGradients();
  RankGradients(const RankGradients&) = delete;
  RankGradients& operator=(const RankGradients&) = delete;

  /// Sets whether the passes that follow are synchronised at their end; returns whether those
  /// before were.
  bool synchronise(bool on) noexcept { return std::exchange(synchronised_, on); }
  /// Prepares for a gradient that is about to go into the chunk's payload. Throws OutOfMemory where
  /// the host has no room for a copy although no other copy waits to be reduced.
  /// Throws Error where the gradient is added to shards of a rank that is gone.
  void arriving(ChunkId chunk, OperatorGate& gate);
  /// Prepares for somebody else who is about to write the chunk's gradients. Throws OutOfMemory.
  /// May be called from any thread.
  void writing(ChunkId chunk) {
    if (in_shared_host_storage(chunk)) {
      take_copy(chunk);
    }
  }
  /// Prepares for a write of this rank's to all gradients there are. Throws OutOfMemory, and has
  /// taken nothing then.
  void writing_all();
  /// Returns whether this rank has a full copy of the chunk's gradients as soon as somebody writes
  /// them.
  [[nodiscard]] bool in_shared_host_storage(ChunkId chunk) const;
  /// Notes that the pass under way brings no more gradients of the chunk, which has all of them.
  void completed(ChunkId chunk, OperatorGate& gate);
  /// Returns when the chunk's gradients are not being reduced.
  void wait(ChunkId chunk);
  /// Returns when the chunk's gradients are in its payload or its shards, and not being reduced.
  /// May be called from any thread. Throws OutOfMemory where the host has no room for them.
  void settle(ChunkId chunk);
  /// Ends the outermost backward pass: reduces gradients, if passes are synchronised. Waits for
  /// the other ranks: the caller gives Python's lock up for this and for begin_step().
  void end_backward(OperatorGate& gate);
  /// Reduces what is left before a step, which may not be taken with gradients that the others do
  /// not have. `optimizer`: number of the optimizer that steps, of several.
  void begin_step(std::optional<std::size_t> optimizer, OperatorGate& gate) {
    average(SyncPoint::kStep, gate, optimizer);
  }
  void end_step() noexcept { consistency_.end_step(); }
  /// Adds the squares of sharded gradients, at each parameter's place. Collective.
  void measure_shards(std::span<double> squares);
  /// Leaves the other ranks for good; see Collectives::leave. May be called from any thread.
  void leave() noexcept {
    ranks_->leave();
    if (sums_) {
      sums_->leave();
    }
  }

  [[nodiscard]] const RankFigures& figures() const noexcept { return figures_; }

 private:
  [[nodiscard]] bool sharded(ChunkId chunk) const {
    return gradient_shards_ != nullptr && gradient_shards_->sharded(chunk);
  }
  // Returns whether this rank has a full copy of the chunk's gradients until they are reduced.
  [[nodiscard]] bool copied(ChunkId chunk) const {
    return sharded(chunk) || in_shared_host_storage(chunk);
  }
  // Returns whether the chunk's gradients are added up where they are, on the device.
  [[nodiscard]] bool added_on_device(ChunkId chunk) const;
  // Returns whether the chunk's gradients may gather on the device.
  [[nodiscard]] bool may_gather(ChunkId chunk) const;
  [[nodiscard]] bool gathering(ChunkId chunk) const {
    return gathered_ && gathered_->gathering(chunk);
  }
  [[nodiscard]] bool reduced_beside_backward(ChunkId chunk) const {
    return copied(chunk) || added_on_device(chunk) || gathering(chunk);
  }
  // Waits while there is no room for another chunk (`full`) and the other ranks reduce some.
  template <typename Full>
  void wait_for_others_while(const Full& full);
  // Has the gradients of a pass gather on the device, if they may and there is a buffer.
  [[nodiscard]] bool begin_gathering(ChunkId chunk, OperatorGate& gate);
  // Takes this rank's full copy of a chunk's gradients.
  void take_copy(ChunkId chunk);
  // Takes the copy that the chunk's first gradient of a pass goes into.
  void begin_copy(ChunkId chunk);
  [[nodiscard]] bool has_copy(ChunkId chunk);  // in shared host storage; not for shards
  // Returns whether copies of shared host storage are blocks (Payload::take_copy), and no pages.
  [[nodiscard]] bool copied_as_block(ChunkId chunk) const {
    return gradients_.payload(chunk)->needs_copies();
  }
  [[nodiscard]] Reservation pay_for_copy(ChunkId chunk);
  void drop_copy(ChunkId chunk);
  void forget_last_step(OperatorGate& gate);
  void reduce(ChunkId chunk);
  void average(SyncPoint point, OperatorGate& gate, std::optional<std::size_t> optimizer = {});
  [[nodiscard]] GradientMarks check_ranks(SyncPoint point, std::optional<std::size_t> optimizer);

  const std::shared_ptr<Collectives> ranks_;
  const std::shared_ptr<DeviceReduction> sums_;
  ConsistencyCheck& consistency_;
  const ChunkLayout& layout_;
  ChunkGradients& gradients_;
  const SharedHostStorage* const shared_storage_;
  GradientShards* const gradient_shards_;
  const ShardMap& shards_;
  Executor& executor_;
  MemoryTier& host_;
  RankFigures figures_;
  Block device_window_;                        // of sums_
  std::unique_ptr<DeviceGradients> gathered_;  // nullptr: the host adds up
  RankReduction reduction_;
  bool synchronised_ = true;
  bool begun_ = false;        // a pass has begun
  bool patient_ = true;       // in this pass: others are expected to come soon
  std::vector<bool> handed_;  // per chunk: in this pass, handed to reductions_
  // Per chunk: behind the kernels that complete it. Written before reductions_ takes the chunk, and
  // read by its thread.
  std::vector<std::unique_ptr<ComputeFence>> fences_;
  Mutex mutex_;
  std::vector<Reservation> copies_ CASTOR_GUARDED_BY(mutex_);  // per chunk
  std::unique_ptr<BackwardReductions> reductions_;             // nullptr: all is full on every rank
};

}  // namespace castor
