#include "core/chunk_reads.h"

#include <cstdint>

#include "core/error.h"

namespace castor {

void ChunkReads::begin() {
  const MutexLock lock(mutex_);
  if (num_reading_ > 0) {
    throw UsageError("a save still reads this model; wait for it: booster.wait_for_saves()");
  }
  for (std::atomic<bool>& chunk : reading_) {
    chunk = true;
  }
  num_reading_ = reading_.size();
}

void ChunkReads::end(ChunkId chunk) {
  const MutexLock lock(mutex_);
  if (reading_[index(chunk)].exchange(false)) {
    --num_reading_;
  }
  ended_.notify_all();
}

void ChunkReads::end_all() {
  const MutexLock lock(mutex_);
  for (std::atomic<bool>& chunk : reading_) {
    chunk = false;
  }
  num_reading_ = 0;
  ended_.notify_all();
}

bool ChunkReads::let_go(ChunkId chunk) {
  if (reading(chunk) && copy_ && copy_(chunk)) {
    end(chunk);
  }
  return !reading(chunk);
}

void ChunkReads::wait(ChunkId chunk) {
  if (!let_go(chunk)) {
    MutexLock lock(mutex_);
    ended_.wait(lock.native(), [this, chunk] { return !reading(chunk); });
  }
}

void ChunkReads::wait_for_all() {
  for (std::size_t i = 0; i < reading_.size() && reading(); ++i) {
    wait(ChunkId{static_cast<std::uint32_t>(i)});
  }
}

}  // namespace castor
