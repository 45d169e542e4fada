#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "core/ids.h"
#include "core/mutex.h"

namespace castor {

/// Account of the chunks that the snapshot of a save still reads in place, on a thread of its own,
/// while training goes on. Whatever would write one of them copies the chunk for the reader first,
/// or waits here until the chunk has been read. The reader waits for nobody, so it always ends.
/// Owned by the session. Thread-safe.
class ChunkReads {
 public:
  /// Copies a chunk for the reader, which reads the copy instead; returns false where it cannot.
  using Copy = std::function<bool(ChunkId)>;

  explicit ChunkReads(std::size_t num_chunks, Copy copy = {})
      : copy_(std::move(copy)), reading_(num_chunks) {}
  ChunkReads(const ChunkReads&) = delete;
  ChunkReads& operator=(const ChunkReads&) = delete;

  /// Marks every chunk as being read. Throws UsageError where one still is.
  void begin();
  /// Marks the chunk as read.
  void end(ChunkId chunk);
  /// Marks all chunks as read: the reader has read them, or nobody will.
  void end_all();
  /// Returns whether the chunk is being read. Never waits.
  [[nodiscard]] bool reading(ChunkId chunk) const noexcept { return reading_[index(chunk)].load(); }
  /// Returns whether any chunk is being read. Never waits.
  [[nodiscard]] bool reading() const noexcept { return num_reading_.load() > 0; }
  /// Returns whether the chunk is not being read, or not any more because this call has copied it.
  /// Never waits.
  [[nodiscard]] bool let_go(ChunkId chunk);
  /// Returns when the chunk is not being read. Costs next to nothing where it is not; otherwise
  /// copies the chunk, or waits for the reader.
  void wait(ChunkId chunk);
  /// Returns when no chunk is being read.
  void wait_for_all();

 private:
  const Copy copy_;
  // Written under the mutex, so that waiting threads are woken; read without it by every update.
  std::vector<std::atomic<bool>> reading_;
  std::atomic<std::size_t> num_reading_ = 0;
  Mutex mutex_;  // nothing else is taken while it is held
  std::condition_variable ended_;
};

}  // namespace castor
