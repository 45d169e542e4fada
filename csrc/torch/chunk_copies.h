#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/chunk_reads.h"
#include "core/executor.h"
#include "core/ledger.h"
#include "core/mutex.h"
#include "core/shard_map.h"
#include "host/mmap_arena.h"
#include "host/piecewise_copy.h"
#include "torch/state_places.h"

namespace castor {

/// Copies of chunks, which a save reads while training changes the chunks themselves: of their
/// weights and optimizer states, of several ranks of this one's parts (docs/design/0008). The
/// memory stays for the next save, the kernel's to take until then. Owned by the session. One save
/// at a time; finish() may be called by any thread meanwhile, all else by one after the other.
class ChunkCopies {
 public:
  /// All outlive this. `host`: pays for the copies while they are there. `reads`: who would write a
  /// chunk, and calls finish() before.
  ChunkCopies(const ChunkLayout& layout, const ShardMap& shards, const StatePlaces& places,
              Executor& executor, Ledger& host, ChunkReads& reads);

  /// Takes memory for copies of chunks, of as many as have some: of `most` bytes and half of what
  /// the budget of the host has left. Chunks that are on NVMe in part, or cut over ranks with their
  /// weights, it leaves out. Nobody writes the others until finish() has returned. Those that a
  /// device holds are copied at once. `states`: beside the weights. Returns the bytes that it took.
  std::size_t begin(std::span<const ChunkId> chunks, bool states, std::size_t most);
  /// Returns when the chunk is copied, with the executor's threads; false where begin() has found
  /// no memory.
  [[nodiscard]] bool finish(ChunkId chunk);
  /// The calling thread makes, where_idle(), what is left of all copies: nobody waits for their
  /// chunks any more.
  void finish_all();
  /// Whether somebody may have to wait until a chunk has been read.
  [[nodiscard]] bool any_held() const noexcept;
  /// Whether the chunk is copied, or will be.
  [[nodiscard]] bool has(ChunkId chunk) const noexcept { return copies_[index(chunk)].made(); }
  /// The elements of this rank's piece of the parameter, flat, as they were; the tensor keeps their
  /// memory. Behind finish().
  [[nodiscard]] at::Tensor piece(ParamId param, PayloadKind kind, at::ScalarType type) const;
  /// The save has read all, or nobody will read it.
  void end();

 private:
  struct Copy {
    std::shared_ptr<std::byte> memory;  // the arena's, for as long as somebody has it
    std::size_t bytes = 0;              // of it
    std::array<std::optional<std::size_t>, kNumPayloadKinds> begins;  // in it, in bytes
    Reservation taken;
    std::shared_ptr<PiecewiseCopy> work;  // guarded by the mutex; nullptr behind end()

    [[nodiscard]] bool made() const noexcept { return taken.bytes() > 0; }
  };
  struct Part {
    PayloadKind kind;
    std::span<const std::byte> bytes;
  };

  [[nodiscard]] std::vector<Part> parts(ChunkId chunk, bool states) const;
  [[nodiscard]] std::shared_ptr<PiecewiseCopy> work_of(ChunkId chunk);
  [[nodiscard]] bool take_memory(Copy& copy, std::size_t bytes);

  const ChunkLayout& layout_;
  const ShardMap& shards_;
  const StatePlaces& places_;
  Executor& executor_;
  Ledger& host_;
  ChunkReads& reads_;
  const std::shared_ptr<MmapArena> arena_;
  Mutex mutex_;
  std::vector<Copy> copies_;  // per chunk
};

}  // namespace castor
