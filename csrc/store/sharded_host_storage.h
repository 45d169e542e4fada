#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/executor.h"
#include "core/memory_tier.h"
#include "core/placement.h"
#include "io/chunk_stream.h"
#include "ranks/weight_shards.h"
#include "store/session_options.h"

namespace castor {

class RankHostStorage;

/// Host storage that ranks shard: each rank keeps its shard of the gradients of every chunk
/// (ZeRO-2), and of the weights (ZeRO-3), with a window that holds full chunks of weights. Empty
/// where the user did not ask for that, or where ranks share full host storage (RankHostStorage).
/// Chunks that live on the device for good are full there. Owned by the session.
class ShardedHostStorage {
 public:
  /// Window buffers: this many full chunks are in host memory beside the shards.
  static constexpr std::size_t kSlots = 4;
  /// Same limit as ParamStore::max_leases: one buffer is left for an operator, and one for that
  /// operator's other operand.
  static constexpr std::size_t kMaxLeases = kSlots - 2;

  /// Full chunks of gradients that host memory is left for; a rank has a few at once.
  static constexpr std::size_t kGradientCopies = 6;

  /// Makes an empty object: nothing is sharded.
  ShardedHostStorage() = default;
  /// Allocates this rank's shards; every rank makes one. `stage`: 2 or 3. `copies`: number of
  /// copies of the weights (WeightShards). The tier and the executor outlive this. Throws
  /// OutOfMemory. Throws UsageError, on every rank, where no chunk has host storage, or not the
  /// same chunks on all ranks.
  ShardedHostStorage(const ChunkLayout& layout, std::span<const Placement> placements,
                     const RankGroups& ranks, std::size_t stage, std::size_t copies,
                     MemoryTier& host, Executor& executor);

  /// Returns the ZeRO stage, 2 or 3; 0: nothing is sharded.
  [[nodiscard]] std::size_t stage() const noexcept { return stage_; }
  /// Returns the shards of weights, which are empty in stage 2, and of gradients. nullptr: nothing
  /// is sharded.
  [[nodiscard]] WeightShards* shards() const noexcept { return shards_.get(); }
  /// Returns the stream of sharded weights. nullptr: weights are full on every rank, or ranks share
  /// them.
  [[nodiscard]] ChunkStream* stream() const noexcept { return stream_.get(); }
  /// Returns, per chunk, whether its weights are sharded.
  [[nodiscard]] const std::vector<bool>& sharded() const noexcept { return sharded_; }
  /// Returns the bytes of the shards of weights that this rank keeps on the host.
  [[nodiscard]] std::size_t shard_bytes() const noexcept { return shard_bytes_; }
  [[nodiscard]] std::size_t window_bytes() const noexcept { return window_.bytes(); }
  /// Returns the bytes that nothing else on the host may take for good.
  [[nodiscard]] std::size_t room_for_copies() const noexcept { return room_for_copies_; }

 private:
  void check_equal_on_all(const RankGroups& ranks, const std::vector<bool>& on_host) const;
  void make_window(const ChunkLayout& layout, MemoryTier& host, Executor& executor);

  std::size_t stage_ = 0;
  std::vector<bool> sharded_;
  std::size_t shard_bytes_ = 0;
  std::size_t room_for_copies_ = 0;
  Block memory_;  // of the shards
  Block window_;
  std::unique_ptr<WeightShards> shards_;
  std::unique_ptr<ChunkStream> stream_;  // destroyed first: reads may be under way
};

/// Makes a session's sharded host storage. Returns an empty object where ranks share host storage
/// (`common`), or the session is alone. Throws as ShardedHostStorage does. Throws UsageError, on
/// every rank, where the ranks cannot keep host storage by the stage that was asked for, or in as
/// many copies.
[[nodiscard]] ShardedHostStorage make_sharded_host_storage(const ChunkLayout& layout,
                                                           std::span<const Placement> placements,
                                                           const SessionOptions& options,
                                                           const RankHostStorage& common,
                                                           MemoryTier& host, Executor& executor);

}  // namespace castor
