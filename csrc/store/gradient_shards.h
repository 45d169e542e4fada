#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/host_blocks.h"
#include "core/memory_tier.h"
#include "core/mutex.h"
#include "ranks/weight_shards.h"
#include "store/address_follower.h"

namespace castor {

/// Sharded gradients: each rank keeps its shard of the mean (ZeRO-2, Rajbhandari et al. 2020,
/// section 5.2, over chunks). At times a rank also has a full copy of a chunk's gradients, which
/// the host pays for:
/// - from the chunk's first gradient of a pass until all ranks have theirs;
/// - while an operator reads p.grad;
/// - after an operator has written p.grad.
///
/// Outside of operators the chunk's follower points nowhere, and torch throws when it is asked for
/// the address: nobody can keep an address that will be another chunk's. A reader asks the other
/// ranks for their shards of the mean, whatever those ranks do at the time (WeightShards). Means
/// change in reduce(), which all ranks call for the same chunks, and which waits for this rank's
/// readers.
///
/// Owned by the session. Thread-safe; by agreement (TensorGate) the callers never drop a copy while
/// somebody uses its address.
class GradientShards {
 public:
  /// Contents that a copy begins with, where it has to be made.
  enum class Contents : std::uint8_t { kZeros, kMean };
  enum class Access : std::uint8_t { kRead, kWrite };

  /// `shards` has the shards of weights by chunk, then those of gradients by chunk, and knows the
  /// ranks. `host` pays for the copies. At most `most_kept` bytes of copies that were dropped are
  /// kept for the next ones, and nobody pays for these. `follower` is told where copies are. All
  /// arguments but `host` outlive this.
  GradientShards(const ChunkLayout& layout, WeightShards& shards, std::shared_ptr<MemoryTier> host,
                 std::size_t most_kept, const AddressFollower& follower);
  ~GradientShards();
  GradientShards(const GradientShards&) = delete;
  GradientShards& operator=(const GradientShards&) = delete;

  /// Returns whether the chunk's gradients are sharded. Otherwise they are full on every rank, or
  /// there are none.
  [[nodiscard]] bool sharded(ChunkId chunk) const noexcept { return shards_.sharded(of(chunk)); }
  /// Returns what torch throws when it is asked for the address of a gradient outside of a visit.
  [[nodiscard]] static const std::string& no_address() noexcept;

  /// Makes a full copy of the chunk's gradients, unless there is one; the copy stays. Throws
  /// OutOfMemory. Throws Error where a rank is gone.
  void take_copy(ChunkId chunk, Contents contents);
  /// Drops the copy, and what was written into it. Requires that no tensor is left over the chunk's
  /// gradients.
  void drop_copy(ChunkId chunk);
  /// Returns whether there is a copy that stays.
  [[nodiscard]] bool has_copy(ChunkId chunk) const;
  /// Returns the address of the full copy of the chunk's gradients. Requires that there is one.
  [[nodiscard]] std::byte* copy(ChunkId chunk) const;
  /// Returns this rank's shard, as a tensor over the gradients shows it: from the copy if that was
  /// written, else from the mean.
  [[nodiscard]] std::byte* shard(ChunkId chunk) const;

  /// Gives the chunk's gradients an address until the visit ends. Makes a copy and throws as
  /// take_copy() does, but a copy that was only read goes when another chunk is read.
  [[nodiscard]] std::shared_ptr<void> visit(ChunkId chunk, Access access);

  /// Function that gets the full copy, and the place of this rank's shard of the mean.
  using Reduce = std::function<void(std::span<const std::byte> copy, std::span<std::byte> shard)>;
  /// Reduces the copies of all ranks to shards of their mean, and drops this rank's copy; without a
  /// copy, `work` gets an empty one, and knows where this rank's gradients are.
  void reduce(ChunkId chunk, const Reduce& work);

  [[nodiscard]] std::size_t shard_bytes() const noexcept { return shard_bytes_; }
  /// Returns the bytes of all copies: copy_bytes() those of now, peak_copy_bytes() the most so far.
  [[nodiscard]] std::size_t copy_bytes() const;
  [[nodiscard]] std::size_t peak_copy_bytes() const;

 private:
  class Visit;
  struct Chunk {
    Block copy;
    std::size_t num_visits = 0;
    bool written = false;  // the copy is not the mean, or will not be
    bool busy = false;     // a thread makes the copy, or reduces it
    bool reduced = false;  // there is a mean
  };
  // Returns the number in `shards_` of the chunk's gradients.
  [[nodiscard]] ChunkId of(ChunkId chunk) const noexcept {
    return ChunkId{static_cast<std::uint32_t>(layout_.chunks().size() + index(chunk))};
  }
  void bring(ChunkId chunk, Contents contents, Access access, std::size_t num_visits);
  [[nodiscard]] Block make(ChunkId chunk, Contents contents);
  void drop(ChunkId chunk) CASTOR_REQUIRES(mutex_);
  void drop_read() CASTOR_REQUIRES(mutex_);
  void end_visit(ChunkId chunk) noexcept;

  const ChunkLayout& layout_;
  WeightShards& shards_;
  HostBlocks blocks_;  // destroyed after the copies
  const AddressFollower& follower_;
  std::size_t shard_bytes_ = 0;
  mutable Mutex mutex_;
  std::condition_variable changed_;  // a chunk is not busy or visited any more
  std::vector<Chunk> chunks_ CASTOR_GUARDED_BY(mutex_);
  std::optional<ChunkId> read_ CASTOR_GUARDED_BY(mutex_);  // its copy is left for the next reader
  std::size_t copy_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t peak_copy_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace castor
