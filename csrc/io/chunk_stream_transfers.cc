#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "io/chunk_stream.h"
#include "io/chunk_stream_slot.h"

// The part of ChunkStream that moves a slot's chunk between memory and NVMe.
namespace castor {

void ChunkStream::without_mutex(Slot& slot, MutexLock& lock,
                                const std::function<void()>& part) CASTOR_NOT_ANALYZED {
  slot.busy = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    part();
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  slot.busy = false;
  changed_.notify_all();
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void ChunkStream::wait_for_others(Slot& slot, MutexLock& lock) {
  changed_.wait(lock.native(), [&slot] { return !slot.busy; });
}

// Called as a write of the slot failed: its chunk is on NVMe in part, if at all.
void ChunkStream::lose(Slot& slot) {
  slot.failure = std::current_exception();
  slot.writing.clear();
  slot.chunk.reset();
  slot.changed = false;
  torn_.store(true, std::memory_order_relaxed);
}

/// Leaves the slot without a chunk, what it held on NVMe.
void ChunkStream::clear(Slot& slot, MutexLock& lock) {
  if (slot.changed) {
    start_write(slot, lock);
  }
  finish_write(slot, lock);
  slot.reading.clear();
  slot.chunk.reset();
  slot.failure = nullptr;
  slot.wanted = false;
  slot.due = false;
}

void ChunkStream::replace(Slot& slot, std::size_t chunk, MutexLock& lock) {
  slot.coming = chunk;
  try {
    clear(slot, lock);
  } catch (...) {
    slot.coming.reset();
    throw;
  }
  slot.coming.reset();
  slot.padded.clear();
  slot.payloads.clear();
  std::size_t offset = 0;
  for (const StoredPayload& payload : chunks_[chunk]) {
    slot.padded.push_back(slot.memory.subspan(offset, payload.padded_bytes()));
    slot.payloads.push_back(slot.padded.back().first(payload.bytes()));
    offset += payload.padded_bytes();
    if (payload.contents() == PayloadContents::kNone) {
      std::fill(slot.padded.back().begin(), slot.padded.back().end(), std::byte{0});
    } else {
      slot.reading.push_back(payload.sourced() ? payload.start_read(slot.padded.back())
                                               : payload.start_read(*queue_, slot.padded.back()));
      counts_.read_bytes += payload.padded_bytes();
    }
  }
  slot.chunk = chunk;
}

void ChunkStream::finish_read(Slot& slot, MutexLock& lock) {
  wait_for_others(slot, lock);
  if (slot.failure) {
    std::rethrow_exception(slot.failure);
  }
  if (slot.reading.empty()) {
    return;
  }
  const StoredChunk& chunk = chunks_[*slot.chunk];
  try {
    without_mutex(slot, lock, [&] {
      for (IoTransfer& transfer : slot.reading) {
        transfer.wait();
      }
      for (std::size_t i = 0; i < chunk.size(); ++i) {
        if (chunk[i].contents() != PayloadContents::kNone && !chunk[i].sourced()) {
          chunk[i].check(executor_, *queue_, slot.padded[i]);
        }
      }
    });
  } catch (...) {
    slot.reading.clear();
    slot.failure = std::current_exception();
    slot.chunk.reset();
    throw;
  }
  slot.reading.clear();
}

void ChunkStream::start_write(Slot& slot, MutexLock& lock) {
  slot.changed = false;
  slot.due = false;
  StoredChunk& chunk = chunks_[*slot.chunk];
  try {
    without_mutex(slot, lock, [&] {
      for (std::size_t i = 0; i < chunk.size(); ++i) {
        slot.writing.push_back(
            chunk[i].start_write(*queue_, executor_, slot.padded[i], verification_));
      }
    });
  } catch (...) {
    lose(slot);
    throw;
  }
  counts_.written_bytes += padded_bytes_of(chunk);
}

void ChunkStream::finish_write(Slot& slot, MutexLock& lock) {
  wait_for_others(slot, lock);
  if (slot.writing.empty()) {
    return;
  }
  StoredChunk& chunk = chunks_[*slot.chunk];
  try {
    without_mutex(slot, lock, [&] {
      for (std::size_t i = 0; i < chunk.size(); ++i) {
        slot.writing[i].wait();
        chunk[i].finish_write();
      }
    });
  } catch (...) {
    lose(slot);
    throw;
  }
  slot.writing.clear();
}

}  // namespace castor
