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
  kRead,    ///< the chunk stays as it is: a checkpoint is saved
  kUpdate,  ///< the chunk is changed, and written back at once: an optimizer step
  /// The chunk is changed, and written back when its memory is needed or flush() is called. Meant
  /// for many small changes of one chunk after another, as states are made or loaded.
  kEdit,
};

/// A chunk's payloads on NVMe, in the order in which they lie in memory.
using StoredChunk = std::vector<StoredPayload>;

/// A window of host memory on chunks whose payloads lie on NVMe. While one chunk is worked on, the
/// next is read and the one before is written.
///
/// The window is divided into window buffers (slots in the code) as large as the largest chunk.
/// With 3 of them, everything that one thread does overlaps; with 2, reads wait for writes; with 1,
/// nothing overlaps. A chunk stays in its window buffer until the memory is needed, so that a chunk
/// that is used again is not read again.
///
/// A payload that was never written reads as zeros. Checksums are made before a write and compared
/// before the first use, in the calling thread and the executor, beside the transfers.
///
/// A transfer that fails is an IoError or CorruptionError of the call that waits for it. After a
/// failed read NVMe holds what it held before. After a failed write the payload is torn and cannot
/// be read (UsageError) until it is discarded.
///
/// Payloads of a PayloadSource, which other ranks have shards of, are only read here. A caller that
/// changes such a payload does so at its source, and then calls forget() for the chunk here.
///
/// Borrows queue, executor and memory. Thread-safe: a thread that pins a chunk keeps no other
/// thread from another chunk, but two threads that change the same chunk must take turns
/// themselves. Calls in a process that was forked from the stream's process throw UsageError.
class ChunkStream {
  struct Slot;

 public:
  /// Makes at most `max_slots` window buffers of `memory`: more than are ever busy would only keep
  /// what is not needed. `memory` has any alignment; give it to the engine as a registered buffer.
  /// `alignment` is ScratchSpace::alignment(). Throws InvalidArgument when the largest chunk does
  /// not fit.
  ChunkStream(std::vector<StoredChunk> chunks, TransferQueue& queue, Executor& executor,
              std::span<std::byte> memory, std::size_t alignment, Verification verification,
              std::size_t max_slots = 4);
  /// Makes a stream over payloads of PayloadSources.
  ChunkStream(std::vector<StoredChunk> chunks, Executor& executor, std::span<std::byte> memory,
              std::size_t alignment, std::size_t max_slots);
  ~ChunkStream();
  ChunkStream(const ChunkStream&) = delete;
  ChunkStream& operator=(const ChunkStream&) = delete;

  /// Pin that keeps a chunk in the window. Move-only. It counts as held by the thread that took it,
  /// and may end in any other thread.
  class Pin {
   public:
    Pin(Pin&& other) noexcept
        : stream_(std::exchange(other.stream_, nullptr)),
          slot_(other.slot_),
          holder_(other.holder_) {}
    Pin& operator=(Pin&&) = delete;
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    ~Pin();

    /// Returns the memory of the payloads, valid once wait() has returned; each span is of
    /// StoredPayload::bytes().
    [[nodiscard]] std::span<const std::span<std::byte>> payloads() const noexcept;
    /// Waits until the payloads have been read and may be used: changed, if `access` says so. Any
    /// thread may call it, several times.
    void wait(StreamAccess access);
    /// Ends the pin; with kUpdate, starts the write. The destructor does the same, but if the write
    /// cannot be started only torn() tells of it.
    void release();

   private:
    friend class ChunkStream;
    Pin(ChunkStream& stream, Slot& slot) noexcept : stream_(&stream), slot_(&slot) {}
    ChunkStream* stream_;
    Slot* slot_;
    std::thread::id holder_ = std::this_thread::get_id();
  };
  /// Pins the chunk in the window, and starts to read it where it is not there. Waits while other
  /// threads hold every window buffer. Throws OutOfMemory where this thread holds them all, or
  /// where all threads that hold any wait here too.
  [[nodiscard]] Pin pin(std::size_t chunk);
  /// Pins several distinct chunks that are needed at the same time: all at once, so that a thread
  /// that waits holds none of them. Threads that pin them one after the other may have to wait for
  /// each other, which is OutOfMemory.
  [[nodiscard]] std::vector<Pin> pin(std::span<const std::size_t> chunks);

  /// Function that gets the payloads of a chunk in their order, each of StoredPayload::bytes().
  using Work = std::function<void(std::span<const std::span<std::byte>> payloads)>;
  /// Does the work on the chunk's payloads, on the calling thread. If the work throws, the contents
  /// that it left in the payloads count.
  void use(std::size_t chunk, StreamAccess access, const Work& work);

  /// Announces that the chunk will be used soon, and starts to read it. Does not read where that
  /// would cost the window buffer of another chunk that was announced and has not been used. Waits
  /// for the write of the chunk that it displaces.
  void prefetch(std::size_t chunk);
  /// Forgets the chunks that were announced and not used: they will not be used soon.
  void forget_announced();
  /// Writes every change to NVMe, and returns when that is done. Changes to pinned chunks are
  /// written when the last pin ends. Rethrows the first error, after it has tried all. Forgets the
  /// chunks that were announced and not used.
  void flush();
  /// Drops the window's copy of the chunk, which differs from its source: the next use reads the
  /// chunk again. Waits for a read of the chunk that is under way. Throws UsageError where the
  /// chunk is pinned.
  void forget(std::size_t chunk);
  /// Waits until no read is under way. A read that failed is the error of whoever uses the chunk.
  void await_reads();
  /// Makes the chunk read as zeros from now on: all of it is about to be written anew. Nobody holds
  /// the chunk.
  void discard(std::size_t chunk);
  /// Discards every chunk.
  void discard_all();

  /// Returns whether a write has failed since the last discard_all(), so that a payload is torn.
  /// Never waits.
  [[nodiscard]] bool torn() const noexcept { return torn_.load(std::memory_order_relaxed); }

  /// Returns the bytes that the chunks take on NVMe, padding included.
  [[nodiscard]] std::uint64_t stored_bytes() const noexcept;
  [[nodiscard]] std::size_t num_slots() const noexcept;
  /// Returns the number of chunks that prefetch can be ahead of the one in use.
  [[nodiscard]] std::size_t max_ahead() const noexcept;
  /// Returns the bytes of memory for `num_slots` window buffers of chunks of `largest_bytes`,
  /// padding included.
  [[nodiscard]] static std::size_t memory_bytes(std::size_t largest_bytes, std::size_t num_slots,
                                                std::size_t alignment) noexcept {
    return largest_bytes * num_slots + alignment - 1;
  }

  /// Bytes transferred since construction, padding included.
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
  void claim(std::span<const std::size_t> chunks, std::vector<Pin>& pins) CASTOR_REQUIRES(mutex_);
  void bring_in(std::span<const Pin> pins, MutexLock& lock) CASTOR_REQUIRES(mutex_);
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

  TransferQueue* const queue_;  // nullptr: all payloads are of PayloadSources
  Executor& executor_;
  const Verification verification_;
  const int process_;               // process that the stream belongs to
  std::atomic<bool> torn_ = false;  // relaxed: orders nothing else
  // Guards no data. A thread that holds no chunk and waits for slots takes it before mutex_. So no
  // other thread without chunks takes the slots that it waits for.
  std::mutex turn_;
  mutable Mutex mutex_;
  std::condition_variable changed_;  // notified when a slot is no longer busy or held
  // The number of both never changes. Chunks are declared before slots, whose transfers end first.
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
