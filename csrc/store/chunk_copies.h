#pragma once

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
#include "store/state_store.h"

namespace castor {

/// Copies of chunks' weights and optimizer states, which a save reads while training changes the
/// chunks themselves (docs/design/0008). With several ranks, only this rank's shards are copied.
/// The memory stays for the next save; until then the kernel may take it. Owned by the session.
///
/// One save at a time. Any thread may call finish() during the save; one thread after the other
/// calls the rest.
class ChunkCopies {
 public:
  /// All arguments outlive this. `host` pays for the copies while they exist. `reads` knows the
  /// chunks that are being read; whoever writes such a chunk calls finish() through it first.
  ChunkCopies(const ChunkLayout& layout, const ShardMap& shards, const StateStore& places,
              Executor& executor, Ledger& host, ChunkReads& reads);

  /// Takes memory for copies of as many of the chunks as fit in `most` bytes, and in half of what
  /// the host's budget has left. Leaves out chunks that are on NVMe in part, and chunks whose
  /// weights are sharded over ranks. Nobody writes a chunk that gets a copy until finish() has
  /// returned. Chunks on the device are copied at once. `states`: optimizer states are copied
  /// beside the weights. Returns the bytes that it took.
  std::size_t begin(std::span<const ChunkId> chunks, bool states, std::size_t most);
  /// Completes the chunk's copy with the executor's threads. Returns false where begin() took no
  /// memory for the chunk.
  [[nodiscard]] bool finish(ChunkId chunk);
  /// Completes all copies on the calling thread, where_idle(). Then nobody waits for the copied
  /// chunks any more.
  void finish_all();
  /// Returns whether somebody may have to wait until the save has read a chunk.
  [[nodiscard]] bool any_awaited() const noexcept;
  /// Returns whether the chunk is copied, or will be.
  [[nodiscard]] bool has(ChunkId chunk) const noexcept { return copies_[index(chunk)].made(); }
  /// Bytes of a snapshot, which keep their memory alive.
  struct Bytes {
    std::shared_ptr<const std::byte> data;
    std::size_t size = 0;
  };
  /// Returns the elements of this rank's piece of the parameter, flat, as the snapshot has them.
  /// Requires that finish() has returned.
  [[nodiscard]] Bytes piece(ParamId param, PayloadKind kind) const;
  /// Ends the save, which has read everything or will read no more: gives the copies' bytes back.
  void end();

 private:
  struct Copy {
    std::shared_ptr<std::byte> memory;  // from the arena; lives as long as somebody has it
    std::size_t bytes = 0;              // size of `memory`
    std::array<std::optional<std::size_t>, kNumPayloadKinds> begins;  // in it, in bytes
    Reservation taken;
    std::shared_ptr<PiecewiseCopy> work;  // guarded by the mutex; nullptr after end()

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
  const StateStore& places_;
  Executor& executor_;
  Ledger& host_;
  ChunkReads& reads_;
  const std::shared_ptr<MmapArena> arena_;
  Mutex mutex_;
  std::vector<Copy> copies_;  // per chunk
};

}  // namespace castor
