#include "core/chunk_reads.h"

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

void ChunkReads::wait(ChunkId chunk) {
  if (reading(chunk)) {
    wait_until([this, chunk] { return !reading(chunk); });
  }
}

void ChunkReads::wait_for_all() {
  if (reading()) {
    wait_until([this] { return !reading(); });
  }
}

template <typename Over>
void ChunkReads::wait_until(Over over) {
  ++num_waiting_;
  {
    MutexLock lock(mutex_);
    ended_.wait(lock.native(), over);
  }
  --num_waiting_;
}

}  // namespace castor
