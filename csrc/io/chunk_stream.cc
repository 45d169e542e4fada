#include "io/chunk_stream.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/units.h"
#include "io/chunk_stream_slot.h"

namespace castor {
namespace {

std::size_t largest(const std::vector<StoredChunk>& chunks) {
  std::size_t bytes = 0;
  for (const StoredChunk& chunk : chunks) {
    bytes = std::max(bytes, padded_bytes_of(chunk));
  }
  return bytes;
}

std::span<std::byte> align(std::span<std::byte> memory, std::size_t alignment) {
  void* data = memory.data();
  std::size_t bytes = memory.size();
  if (std::align(alignment, 1, data, bytes) == nullptr) {
    return {};
  }
  return {static_cast<std::byte*>(data), bytes};
}

}  // namespace

ChunkStream::ChunkStream(std::vector<StoredChunk> chunks, TransferQueue& queue, Executor& executor,
                         std::span<std::byte> memory, std::size_t alignment,
                         Verification verification, std::size_t max_slots)
    : queue_(queue),
      executor_(executor),
      verification_(verification),
      process_(getpid()),
      chunks_(std::move(chunks)) {
  const std::span<std::byte> window = align(memory, alignment);
  const std::size_t slot_bytes = largest(chunks_);
  if (slot_bytes == 0) {
    return;
  }
  for (std::size_t i = 0; i < std::min(max_slots, window.size() / slot_bytes); ++i) {
    slots_.emplace_back().memory = window.subspan(i * slot_bytes, slot_bytes);
  }
  if (slots_.empty()) {
    throw InvalidArgument("the window on NVMe has " + format_bytes(window.size()) +
                          ", and the largest chunk needs " + format_bytes(slot_bytes) +
                          ": give the host tier more memory, or make chunks smaller");
  }
}

// The slots' transfers wait in their destructors.
ChunkStream::~ChunkStream() = default;

void ChunkStream::check_process() const {
  if (getpid() != process_) {
    throw UsageError("process " + std::to_string(getpid()) + " was forked from process " +
                     std::to_string(process_) +
                     ", which alone can use what it keeps on NVMe; use the model where it was "
                     "boosted, or start other processes with the \"spawn\" method");
  }
}

std::size_t ChunkStream::num_slots() const noexcept { return slots_.size(); }

// One slot is left for the write of the chunk before, if there are 3.
std::size_t ChunkStream::max_ahead() const noexcept {
  return slots_.size() <= 1 ? 0 : std::max<std::size_t>(1, slots_.size() - 2);
}

ChunkStream::Counts ChunkStream::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

ChunkStream::Slot* ChunkStream::find(std::size_t chunk) {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [chunk](const Slot& slot) {
    return slot.chunk == chunk || slot.coming == chunk;
  });
  return found == slots_.end() ? nullptr : &*found;
}

// Empty slots first; those that were announced and not used last. nullptr: all are in use.
ChunkStream::Slot* ChunkStream::most_dispensable() {
  const auto rank = [](const Slot& slot) {
    return std::tuple(slot.wanted, slot.chunk.has_value(), slot.last_use);
  };
  Slot* best = nullptr;
  for (Slot& slot : slots_) {
    const bool free = !slot.busy && slot.holders.empty();
    if (free && (best == nullptr || rank(slot) < rank(*best))) {
      best = &slot;
    }
  }
  return best;
}

ChunkStream::Hold ChunkStream::take(Slot& slot) {
  slot.holders.push_back(std::this_thread::get_id());
  slot.wanted = false;
  slot.last_use = ++num_uses_;
  return {*this, slot};
}

// What is in the window already waits for nobody's turn: who holds a chunk may come back for it.
bool ChunkStream::take_present(std::span<const std::size_t> chunks, std::vector<Hold>& holds) {
  const std::lock_guard lock(mutex_);
  std::vector<Slot*> found;
  for (const std::size_t chunk : chunks) {
    found.push_back(find(chunk));
    if (found.back() == nullptr || found.back()->chunk != chunk || found.back()->coming) {
      return false;
    }
  }
  for (Slot* const slot : found) {
    holds.push_back(take(*slot));
  }
  return true;
}

// Only what other threads hold, or work on, comes free while this one waits.
void ChunkStream::check_progress(std::size_t chunk) const {
  const auto self = std::this_thread::get_id();
  for (const Slot& slot : slots_) {
    if (slot.busy || std::any_of(slot.holders.begin(), slot.holders.end(),
                                 [self](std::thread::id holder) { return holder != self; })) {
      return;
    }
  }
  const std::size_t window = slots_.size() * slots_.front().memory.size();
  throw OutOfMemory(
      TierKind::kHost, padded_bytes_of(chunks_[chunk]), 0, window,
      chunks_[chunk].front().name() + " has to be read from NVMe, and each of the " +
          std::to_string(slots_.size()) +
          " slots of the window holds what this thread uses at the same time (in one operator); "
          "raise host_memory, or make chunks smaller (chunk_bytes)");
}

ChunkStream::Slot& ChunkStream::bring_in(std::size_t chunk, Lock& lock) {
  for (;;) {
    Slot* slot = find(chunk);
    if (slot == nullptr) {
      slot = most_dispensable();
      if (slot != nullptr) {
        replace(*slot, chunk, lock);
        return *slot;
      }
      check_progress(chunk);
    } else if (slot->chunk == chunk && !slot->coming) {
      return *slot;
    }
    changed_.wait(lock);
  }
}

std::vector<ChunkStream::Hold> ChunkStream::hold(std::span<const std::size_t> chunks) {
  check_process();
  std::vector<Hold> holds;  // before the locks: where it fails, they go first
  if (take_present(chunks, holds)) {
    return holds;
  }
  const std::lock_guard turn(turn_);
  Lock lock(mutex_);
  for (const std::size_t chunk : chunks) {
    holds.push_back(take(bring_in(chunk, lock)));
  }
  return holds;
}

ChunkStream::Hold ChunkStream::hold(std::size_t chunk) {
  return std::move(hold(std::span(&chunk, 1)).front());
}

void ChunkStream::release(Slot& slot, std::thread::id holder) {
  Lock lock(mutex_);
  slot.holders.erase(std::find(slot.holders.begin(), slot.holders.end(), holder));
  if (slot.holders.empty() && slot.due && slot.changed && slot.chunk) {
    wait_for_others(slot, lock);
    if (slot.due && slot.chunk) {
      start_write(slot, lock);
    }
  }
  changed_.notify_all();
}

ChunkStream::Hold::~Hold() {
  try {
    release();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): torn() tells of it
  }
}

std::span<const std::span<std::byte>> ChunkStream::Hold::payloads() const noexcept {
  return slot_->payloads;
}

void ChunkStream::Hold::wait(StreamAccess access) {
  Lock lock(stream_->mutex_);
  stream_->finish_read(*slot_, lock);
  if (access == StreamAccess::kRead) {
    return;
  }
  stream_->finish_write(*slot_, lock);
  slot_->changed = true;
  slot_->due = slot_->due || access == StreamAccess::kUpdate;
}

void ChunkStream::Hold::release() {
  if (ChunkStream* const stream = std::exchange(stream_, nullptr)) {
    stream->release(*slot_, holder_);
  }
}

void ChunkStream::use(std::size_t chunk, StreamAccess access, const Work& work) {
  Hold held = hold(chunk);
  held.wait(access);
  work(held.payloads());
  held.release();
}

void ChunkStream::prefetch(std::size_t chunk) {
  check_process();
  Lock lock(mutex_);
  if (Slot* const here = find(chunk)) {
    here->wanted = true;
    return;
  }
  Slot* const slot = most_dispensable();
  if (slot == nullptr || slot->wanted) {
    return;
  }
  replace(*slot, chunk, lock);
  slot->wanted = true;
}

void ChunkStream::forget_announced() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    slot.wanted = false;
  }
}

void ChunkStream::flush() {
  check_process();
  Lock lock(mutex_);
  std::exception_ptr first;
  const auto attempt = [&](void (ChunkStream::*part)(Slot&, Lock&), Slot& slot) {
    try {
      (this->*part)(slot, lock);
    } catch (const Error&) {
      first = first ? first : std::current_exception();
    }
  };
  for (Slot& slot : slots_) {
    slot.wanted = false;
    wait_for_others(slot, lock);
    if (slot.changed && slot.chunk) {
      attempt(&ChunkStream::start_write, slot);
    }
  }
  for (Slot& slot : slots_) {
    attempt(&ChunkStream::finish_write, slot);
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

void ChunkStream::discard(std::size_t chunk) {
  check_process();
  Lock lock(mutex_);
  if (Slot* const slot = find(chunk)) {
    wait_for_others(*slot, lock);
    if (slot->chunk == chunk) {
      slot->reading.clear();  // waits for them
      slot->writing.clear();
      slot->changed = false;
      std::fill(slot->memory.begin(), slot->memory.end(), std::byte{0});
    }
  }
  for (StoredPayload& payload : chunks_[chunk]) {
    payload.discard();
  }
}

void ChunkStream::discard_all() {
  for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    discard(chunk);
  }
  torn_.store(false, std::memory_order_relaxed);
}

}  // namespace castor
