#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/chunk_reads.h"
#include "core/shard_map.h"
#include "dist/rank_weights.h"
#include "torch/state_places.h"

namespace castor {

/// One parameter's update; its gradient is in its payload.
struct ParamUpdate {
  ParamId param{};
  RuleCoefficients coefficients;
  RoundingKey rounding;
  bool steps_states = true;  ///< UpdateRule::steps_states
};

/// Runs the rule's updates of chunks, where their payloads are: on the host, through the window of
/// what lies on NVMe, or on the device. Of several ranks each updates its parts, and brings those
/// of the others: all run the same updates in the same order. Owned by the session. Updates of
/// different chunks may run on different threads; none may overlap anything else that touches its
/// chunk, but for a save that reads it (ChunkReads), for which it waits.
///
/// For chunks on NVMe every call may throw IoError or CorruptionError.
class ChunkUpdates {
 public:
  /// All outlive this. `ranks`: nullptr for a process that is alone.
  ChunkUpdates(const ChunkLayout& layout, const ShardMap& shards, StatePlaces& places,
               Executor& executor, std::shared_ptr<const UpdateRule> rule, ChunkReads& reads,
               RankWeights* ranks);

  /// Whether other ranks run the same updates, and wait for each.
  [[nodiscard]] bool together() const noexcept { return ranks_ != nullptr; }
  /// Throws UsageError where another optimizer updates the parameters.
  [[nodiscard]] const UpdateRule& rule() const;
  /// What the stochastic rounding depends on: `streams[i]` tells parameter i apart from the others.
  void set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams);
  /// The parameter's update at its step, which counts from 1. What it gives does not depend on
  /// when, in which order and with which others it runs. Throws as UpdateRule::coefficients.
  [[nodiscard]] ParamUpdate update_of(ParamId param, const RuleOptions& options, std::int64_t step,
                                      double grad_scale) const;
  /// They are about to run, or to be queued, on every rank.
  void begin(ChunkId chunk) const { places_.begin_update(chunk); }
  /// Runs updates of one chunk. What lies on NVMe may still be on its way there on return; what the
  /// device holds is given to its stream, and others' parts of it come with gather().
  void run(ChunkId chunk, std::span<const ParamUpdate> updates);
  /// Of a chunk that the device holds: the other ranks' parts of its weights come, and they have
  /// this one's. For run() they come in the same order of chunks, wherever these are.
  void gather(ChunkId chunk) { bring_others_parts(std::span(&chunk, 1)); }
  /// Runs the updates of every chunk, one entry each; all is on NVMe on return. `num_begun` counts
  /// the chunks that have been changed, also where it throws.
  void run_all(std::span<const std::vector<ParamUpdate>> updates, std::size_t& num_begun);

 private:
  void add_segments(std::span<const ParamUpdate> updates, const ChunkMemory& memory,
                    std::vector<UpdateSegment>& segments) const;
  void run_on_host(std::span<UpdateSegment> segments) const;
  void run_on_device(std::span<UpdateSegment> segments) const;
  /// A chunk's memory, as this rank's part of it is updated.
  [[nodiscard]] ChunkMemory to_update(ChunkId chunk, ChunkMemory memory) const;
  void bring_others_parts(std::span<const ChunkId> chunks);

  const ChunkLayout& layout_;
  const ShardMap& shards_;
  StatePlaces& places_;
  Executor& executor_;
  const std::shared_ptr<const UpdateRule> rule_;
  ChunkReads& reads_;
  RankWeights* const ranks_;
  std::uint64_t seed_ = 0;
  std::vector<std::uint64_t> streams_;
};

}  // namespace castor
