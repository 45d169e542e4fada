#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/chunk_reads.h"
#include "core/shard_map.h"
#include "ranks/rank_weights.h"
#include "store/device_updates.h"
#include "store/state_store.h"

namespace castor {

/// Update of one parameter, whose gradient is in its payload.
struct ParamUpdate {
  ParamId param{};
  RuleCoefficients coefficients;
  RoundingKey rounding;
  bool steps_states = true;  ///< UpdateRule::steps_states
};

/// Runner of the update rule, one chunk after the other, where the chunk's payloads are: on the
/// host, on the device, or through the window for payloads on NVMe. A share of the host's updates
/// may run on the device (DeviceUpdates). With several ranks, each
/// updates its shards and brings in those of the others; all run the same updates in the same
/// order. Owned by the session.
///
/// Updates of different chunks may run on different threads. An update may not overlap anything
/// else that touches its chunk, except a save that reads it (ChunkReads): the update waits for
/// that.
///
/// For chunks on NVMe every call may throw IoError or CorruptionError.
class ChunkUpdates {
 public:
  /// All arguments outlive this. `ranks`: nullptr for a process that is alone. `on_device`: nullptr
  /// where the host updates all that is in its memory.
  ChunkUpdates(const ChunkLayout& layout, const ShardMap& shards, StateStore& places,
               Executor& executor, std::shared_ptr<const UpdateRule> rule, ChunkReads& reads,
               RankWeights* ranks, DeviceUpdates* on_device);

  /// Returns whether other ranks run the same updates, and wait for each of them.
  [[nodiscard]] bool collective() const noexcept { return ranks_ != nullptr; }
  /// Returns the update rule. Throws UsageError where another optimizer updates the parameters.
  [[nodiscard]] const UpdateRule& rule() const;
  /// Sets what stochastic rounding depends on: the seed, and `streams[i]`, which tells parameter i
  /// apart from the others.
  void set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams);
  /// Returns the parameter's update at `step`, which counts from 1. The result of the update does
  /// not depend on when, in which order and with which others it runs. Throws what
  /// UpdateRule::coefficients throws.
  [[nodiscard]] ParamUpdate update_of(ParamId param, const RuleOptions& options, std::int64_t step,
                                      double grad_scale) const;
  /// Announces that updates of the chunk are about to run, or to be queued, on every rank.
  void begin(ChunkId chunk);
  /// Runs updates of one chunk. On return, payloads on NVMe may still be on their way there. On the
  /// device the updates have been given to the stream, and the shards of other ranks come with
  /// gather().
  void run(ChunkId chunk, std::span<const ParamUpdate> updates);
  /// Brings in the other ranks' shards of the weights of a chunk on the device, and gives them this
  /// rank's. Shards are exchanged, by run() or gather(), in the same order of chunks on every rank,
  /// wherever the chunks are.
  void gather(ChunkId chunk) { gather_shards(std::span(&chunk, 1)); }
  /// Runs the updates of every chunk, one entry for each; all changes to NVMe are written on
  /// return. `num_begun` counts the chunks that have been changed, also where this throws.
  void run_all(std::span<const std::vector<ParamUpdate>> updates, std::size_t& num_begun);

 private:
  void add_segments(std::span<const ParamUpdate> updates, const ChunkMemory& memory,
                    std::vector<UpdateSegment>& segments) const;
  void run_on_host(std::span<UpdateSegment> segments) const;
  void run_on_device(std::span<UpdateSegment> segments) const;
  /// Returns a chunk's memory with the weights where this rank updates its shard of them.
  [[nodiscard]] ChunkMemory to_update(ChunkId chunk, ChunkMemory memory) const;
  void gather_shards(std::span<const ChunkId> chunks);

  const ChunkLayout& layout_;
  const ShardMap& shards_;
  StateStore& places_;
  Executor& executor_;
  const std::shared_ptr<const UpdateRule> rule_;
  ChunkReads& reads_;
  RankWeights* const ranks_;
  DeviceUpdates* const on_device_;
  std::uint64_t seed_ = 0;
  std::vector<std::uint64_t> streams_;
};

}  // namespace castor
