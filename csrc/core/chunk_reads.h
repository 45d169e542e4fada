#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <vector>

#include "core/ids.h"
#include "core/mutex.h"

namespace castor {

/// Chunks whose weights and states a save still reads, on a thread of its own, while training goes
/// on: whatever would write one of them waits here until it has been read. The reader waits for
/// nobody, so it always ends. Owned by the session. Thread-safe.
class ChunkReads {
 public:
  explicit ChunkReads(std::size_t num_chunks) : reading_(num_chunks) {}
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
  /// Returns when the chunk is not being read. Costs next to nothing where it is not.
  void wait(ChunkId chunk);
  /// ... no chunk is.
  void wait_for_all();
  /// Whether anybody waits for the reader. Never waits.
  [[nodiscard]] bool awaited() const noexcept { return num_waiting_.load() > 0; }

 private:
  template <typename Over>
  void wait_until(Over over);

  // Written under the mutex, so that whoever waits is woken; read without it by every update.
  std::vector<std::atomic<bool>> reading_;
  std::atomic<std::size_t> num_reading_ = 0;
  std::atomic<std::size_t> num_waiting_ = 0;
  Mutex mutex_;  // nothing else is taken while it is held
  std::condition_variable ended_;
};

}  // namespace castor
