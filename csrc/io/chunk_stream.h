#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/executor.h"
#include "core/mutex.h"
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
/// chunk: 3 slots overlap everything that one thread does, 2 wait for writes, 1 does one thing at a
/// time. A chunk stays in its slot until the memory is needed, so that one used again is not read
/// again.
///
/// A payload that was never written reads as zeros. Checksums are made before a write and compared
/// before the first use, in the calling thread and the executor, beside the transfers.
///
/// A transfer that fails is an IoError or CorruptionError of the call that waits for it. After a
/// failed read NVMe holds what it held; after a failed write the payload is torn and refuses to be
/// read (UsageError) until it is discarded.
///
/// Payloads of a PayloadSource (other ranks have parts of them) are read alone: who changes one
/// does so there, and forgets what the window has of it.
///
/// Borrows queue, executor and memory. Thread-safe: who holds a chunk keeps nobody from another
/// one, but two who change the same chunk must take turns themselves. Calls of a process that was
/// forked from the stream's throw UsageError.
class ChunkStream {
  struct Slot;

 public:
  /// `memory` has any alignment; give it to the engine as a registered buffer. `alignment` is
  /// ScratchSpace::alignment(). At most `max_slots` slots are made of it: more than have something
  /// to do would only keep what is not needed. Throws InvalidArgument when the largest chunk does
  /// not fit.
  ChunkStream(std::vector<StoredChunk> chunks, TransferQueue& queue, Executor& executor,
              std::span<std::byte> memory, std::size_t alignment, Verification verification,
              std::size_t max_slots = 4);
  /// Over payloads of PayloadSources.
  ChunkStream(std::vector<StoredChunk> chunks, Executor& executor, std::span<std::byte> memory,
              std::size_t alignment, std::size_t max_slots);
  ~ChunkStream();
  ChunkStream(const ChunkStream&) = delete;
  ChunkStream& operator=(const ChunkStream&) = delete;

  /// Keeps a chunk in the window. Move-only. It counts as held by the thread that took it, and may
  /// end in any other.
  class Hold {
   public:
    Hold(Hold&& other) noexcept
        : stream_(std::exchange(other.stream_, nullptr)),
          slot_(other.slot_),
          holder_(other.holder_) {}
    Hold& operator=(Hold&&) = delete;
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    ~Hold();

    /// Where the payloads are, once wait() has returned; each of StoredPayload::bytes().
    [[nodiscard]] std::span<const std::span<std::byte>> payloads() const noexcept;
    /// Returns when they have been read and may be used: changed, if `access` says so. Any thread
    /// may call it, and again.
    void wait(StreamAccess access);
    /// Ends the hold; with kUpdate, starts the write. The destructor does the same, but if the
    /// write cannot be started only torn() tells of it.
    void release();

   private:
    friend class ChunkStream;
    Hold(ChunkStream& stream, Slot& slot) noexcept : stream_(&stream), slot_(&slot) {}
    ChunkStream* stream_;
    Slot* slot_;
    std::thread::id holder_ = std::this_thread::get_id();
  };
  /// Starts to read the chunk where it is not in the window, and keeps it there. Waits where every
  /// slot is held by other threads; throws OutOfMemory where it is this one that holds them, or
  /// where all who hold any wait here too.
  [[nodiscard]] Hold hold(std::size_t chunk);
  /// As hold, for several distinct chunks that are needed at the same time: all at once, so that
  /// who waits holds none of them. Threads that take them one after the other may have to wait for
  /// each other, which is OutOfMemory.
  [[nodiscard]] std::vector<Hold> hold(std::span<const std::size_t> chunks);

  /// Gets the payloads of a chunk in their order, each of StoredPayload::bytes().
  using Work = std::function<void(std::span<const std::span<std::byte>> payloads)>;
  /// Does the work on the chunk's payloads, on the calling thread. If the work throws, what it left
  /// behind counts.
  void use(std::size_t chunk, StreamAccess access, const Work& work);

  /// The chunk will be used soon: starts to read it, unless that would cost the slot of another one
  /// that was announced and has not been used. Waits for the write of the chunk that it displaces.
  void prefetch(std::size_t chunk);
  /// What was announced and not used will not be used soon.
  void forget_announced();
  /// Returns when every change is on NVMe, but those to chunks that somebody holds: they are
  /// written when the last hold ends. Rethrows the first error, after it has tried all. What was
  /// announced and not used is forgotten.
  void flush();
  /// What the window has of the chunk is not what its source has: the next use reads it again.
  /// Nobody holds it; a read of it that is under way is waited for.
  void forget(std::size_t chunk);
  /// Returns when no read is under way; one that failed is the error of whoever uses the chunk.
  void await_reads();
  /// The chunk reads as zeros from now on: all of it is about to be written anew. Nobody holds it.
  void discard(std::size_t chunk);
  /// Every chunk does.
  void discard_all();

  /// Whether a write failed since the last discard_all(): a payload is torn. Never waits.
  [[nodiscard]] bool torn() const noexcept { return torn_.load(std::memory_order_relaxed); }

  /// What the chunks take on NVMe, padding included.
  [[nodiscard]] std::uint64_t stored_bytes() const noexcept;
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
  void check_process() const;
  Slot* find(std::size_t chunk) CASTOR_REQUIRES(mutex_);
  Slot* most_dispensable() CASTOR_REQUIRES(mutex_);
  bool present(std::span<const std::size_t> chunks) CASTOR_REQUIRES(mutex_);
  bool can_claim(std::span<const std::size_t> chunks) CASTOR_REQUIRES(mutex_);
  void claim(std::span<const std::size_t> chunks, std::vector<Hold>& holds) CASTOR_REQUIRES(mutex_);
  void bring_in(std::span<const Hold> holds, MutexLock& lock) CASTOR_REQUIRES(mutex_);
  void wait_for_slots(std::span<const std::size_t> chunks, MutexLock& lock) CASTOR_REQUIRES(mutex_);
  [[noreturn]] void throw_no_slots(std::span<const std::size_t> chunks) CASTOR_REQUIRES(mutex_);
  void release(Slot& slot, std::thread::id holder);
  void replace(Slot& slot, std::size_t chunk, MutexLock& lock) CASTOR_REQUIRES(mutex_);
  void clear(Slot& slot, MutexLock& lock) CASTOR_REQUIRES(mutex_);
  void wait_for_others(Slot& slot, MutexLock& lock) CASTOR_REQUIRES(mutex_);
  void without_mutex(Slot& slot, MutexLock& lock, const std::function<void()>& part)
      CASTOR_REQUIRES(mutex_);
  void finish_read(Slot& slot, MutexLock& lock) CASTOR_REQUIRES(mutex_);
  void start_write(Slot& slot, MutexLock& lock) CASTOR_REQUIRES(mutex_);
  void finish_write(Slot& slot, MutexLock& lock) CASTOR_REQUIRES(mutex_);
  void lose(Slot& slot) CASTOR_REQUIRES(mutex_);

  ChunkStream(std::vector<StoredChunk> chunks, TransferQueue* queue, Executor& executor,
              std::span<std::byte> memory, std::size_t alignment, Verification verification,
              std::size_t max_slots);

  TransferQueue* const queue_;  // nullptr: all payloads are of sources
  Executor& executor_;
  const Verification verification_;
  const int process_;               // that the stream belongs to
  std::atomic<bool> torn_ = false;  // relaxed: orders nothing else
  // Guards nothing. Taken before mutex_: by who holds nothing and waits for slots, so that nobody
  // else who holds nothing takes what it waits for.
  std::mutex turn_;
  mutable Mutex mutex_;
  std::condition_variable changed_;  // a slot is no longer busy or held
  // As many of both as there were at first. Chunks before slots, whose transfers end first.
  std::vector<StoredChunk> chunks_ CASTOR_GUARDED_BY(mutex_);
  std::vector<Slot> slots_ CASTOR_GUARDED_BY(mutex_);
  struct Waiting {
    std::thread::id thread;
    std::span<const std::size_t> chunks;
  };
  std::vector<Waiting> waiting_ CASTOR_GUARDED_BY(mutex_);  // for slots
  std::uint64_t num_uses_ CASTOR_GUARDED_BY(mutex_) = 0;
  Counts counts_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
