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

/// Chunks whose weights and states a save still reads where they are, on a thread of its own, while
/// training goes on: whatever would write one of them copies it for the reader first, or waits here
/// until it has been read. The reader waits for nobody, so it always ends. Owned by the session.
/// Thread-safe.
class ChunkReads {
 public:
  /// Copies a chunk for the reader, which reads that instead; false where it cannot.
  using Copy = std::function<bool(ChunkId)>;

  explicit ChunkReads(std::size_t num_chunks, Copy copy = {})
      : copy_(std::move(copy)), reading_(num_chunks) {}
  ChunkReads(const ChunkReads&) = delete;
  ChunkReads& operator=(const ChunkReads&) = delete;

  /// Every chunk is read from now on. Throws UsageError where one still is.
  void begin();
  /// The chunk has been read.
  void end(ChunkId chunk);
  /// All have been, or nobody will read them.
  void end_all();
  /// Never waits.
  [[nodiscard]] bool reading(ChunkId chunk) const noexcept { return reading_[index(chunk)].load(); }
  /// Whether any chunk is. Never waits.
  [[nodiscard]] bool reading() const noexcept { return num_reading_.load() > 0; }
  /// Whether the chunk is not being read, or not any more since it was copied: never waits.
  [[nodiscard]] bool let_go(ChunkId chunk);
  /// Returns when the chunk is not being read, which costs next to nothing where it is not; else it
  /// is copied, or waited for.
  void wait(ChunkId chunk);
  /// ... no chunk is.
  void wait_for_all();

 private:
  const Copy copy_;
  // Written under the mutex, so that whoever waits is woken; read without it by every update.
  std::vector<std::atomic<bool>> reading_;
  std::atomic<std::size_t> num_reading_ = 0;
  Mutex mutex_;  // nothing else is taken while it is held
  std::condition_variable ended_;
};

}  // namespace castor
