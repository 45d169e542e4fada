#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "core/executor.h"
#include "io/stored_payload.h"
#include "io/transfer_queue.h"

namespace castor {

enum class StreamAccess : std::uint8_t {
  kRead,    ///< left as it is: a checkpoint is saved
  kUpdate,  ///< changed, and written back at once: an optimizer step
  /// Changed, and written back when its memory is needed or flush() is called: many small changes
  /// of one chunk after another, as states are made or loaded.
  kEdit,
};

/// A chunk's payloads on NVMe, in the order in which they lie in memory.
using StoredChunk = std::vector<StoredPayload>;

/// A window of host memory on chunks whose payloads lie on NVMe. While one chunk is worked on, the
/// next is read and the one before is written. The window is cut into slots as large as the largest
/// chunk: 3 slots overlap everything, 2 wait for writes, 1 does one thing at a time. A chunk stays
/// in its slot until the memory is needed, so that one used again is not read again.
///
/// A payload that was never written reads as zeros. Checksums are made before a write and compared
/// before the first use, in the calling thread and the executor, beside the transfers.
///
/// A transfer that fails is an IoError or CorruptionError of the call that waits for it. After a
/// failed read NVMe holds what it held; after a failed write the payload is torn and refuses to be
/// read (UsageError) until discard_all().
///
/// Borrows queue, executor and memory. Thread-safe: one call at a time, its work included.
class ChunkStream {
 public:
  /// More slots than this would only read further ahead than the device is deep.
  static constexpr std::size_t kMaxSlots = 4;

  /// `memory` has any alignment; give it to the engine as a registered buffer. `alignment` is
  /// ScratchSpace::alignment(). Throws InvalidArgument when the largest chunk does not fit.
  ChunkStream(std::vector<StoredChunk> chunks, TransferQueue& queue, Executor& executor,
              std::span<std::byte> memory, std::size_t alignment, Verification verification);
  ~ChunkStream();
  ChunkStream(const ChunkStream&) = delete;
  ChunkStream& operator=(const ChunkStream&) = delete;

  /// Gets the payloads of a chunk in their order, each of StoredPayload::bytes().
  using Work = std::function<void(std::span<const std::span<std::byte>> payloads)>;

  /// The chunk will be used soon: starts to read it, unless that would cost the slot of another one
  /// that was announced and has not been used. Waits for the write of the chunk that it displaces.
  void prefetch(std::size_t chunk);
  /// Does the work on the chunk's payloads, on the calling thread. If the work throws, what it left
  /// behind counts.
  void use(std::size_t chunk, StreamAccess access, const Work& work);
  /// Returns when every change is on NVMe. Rethrows the first error, after it has tried all. What
  /// was announced and not used is forgotten.
  void flush();
  /// Every chunk reads as zeros from now on: all is about to be written anew.
  void discard_all();

  /// Whether a write failed since the last discard_all(): a payload is torn. Never waits.
  [[nodiscard]] bool torn() const noexcept { return torn_.load(std::memory_order_relaxed); }

  [[nodiscard]] std::size_t num_slots() const noexcept;
  /// Chunks that prefetch can be ahead of the one in use.
  [[nodiscard]] std::size_t max_ahead() const noexcept;
  /// Memory that gives `num_slots` slots to chunks of `largest_bytes`, padding included.
  [[nodiscard]] static std::size_t memory_bytes(std::size_t largest_bytes, std::size_t num_slots,
                                                std::size_t alignment) noexcept {
    return largest_bytes * num_slots + alignment - 1;
  }

  /// Since construction, padding included.
  struct Counts {
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
  };
  [[nodiscard]] Counts counts() const;

 private:
  struct Slot;

  Slot* find(std::size_t chunk);
  Slot& most_dispensable();
  void clear(Slot& slot);
  void load(Slot& slot, std::size_t chunk);
  void finish_read(Slot& slot);
  void start_write(Slot& slot);
  void finish_write(Slot& slot);

  TransferQueue& queue_;
  Executor& executor_;
  const Verification verification_;
  std::atomic<bool> torn_ = false;   // relaxed: orders nothing else
  mutable std::mutex mutex_;         // guards everything below
  std::vector<StoredChunk> chunks_;  // before slots_, whose transfers end first
  std::vector<Slot> slots_;
  std::uint64_t num_uses_ = 0;
  Counts counts_;
};

}  // namespace castor
