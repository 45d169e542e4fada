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
    : ChunkStream(std::move(chunks), &queue, executor, memory, alignment, verification, max_slots) {
}

ChunkStream::ChunkStream(std::vector<StoredChunk> chunks, Executor& executor,
                         std::span<std::byte> memory, std::size_t alignment, std::size_t max_slots)
    : ChunkStream(std::move(chunks), nullptr, executor, memory, alignment, Verification::kOff,
                  max_slots) {}

ChunkStream::ChunkStream(std::vector<StoredChunk> chunks, TransferQueue* queue, Executor& executor,
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

std::uint64_t ChunkStream::stored_bytes() const noexcept CASTOR_NOT_ANALYZED {
  std::uint64_t bytes = 0;
  for (const StoredChunk& chunk : chunks_) {
    bytes += padded_bytes_of(chunk);
  }
  return bytes;
}

std::size_t ChunkStream::num_slots() const noexcept CASTOR_NOT_ANALYZED { return slots_.size(); }

// One slot is left for the write of the chunk before, if there are 3.
std::size_t ChunkStream::max_ahead() const noexcept {
  return num_slots() <= 1 ? 0 : std::max<std::size_t>(1, num_slots() - 2);
}

ChunkStream::Counts ChunkStream::counts() const {
  const MutexLock lock(mutex_);
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
    if (slot.free() && (best == nullptr || rank(slot) < rank(*best))) {
      best = &slot;
    }
  }
  return best;
}

bool ChunkStream::present(std::span<const std::size_t> chunks) {
  return std::all_of(chunks.begin(), chunks.end(),
                     [this](std::size_t chunk) CASTOR_REQUIRES(mutex_) {
                       const Slot* const slot = find(chunk);
                       return slot != nullptr && slot->chunk == chunk && !slot->coming;
                     });
}

// Whether there is a slot for each. None may be on its way in or out: that is another thread's.
bool ChunkStream::can_claim(std::span<const std::size_t> chunks) {
  auto num_free =
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.free(); });
  for (const std::size_t chunk : chunks) {
    const Slot* const slot = find(chunk);
    if (slot != nullptr && (slot->chunk != chunk || slot->coming)) {
      return false;
    }
    num_free -= slot == nullptr || slot->free() ? 1 : 0;
  }
  return num_free >= 0;
}

// Requires can_claim.
void ChunkStream::claim(std::span<const std::size_t> chunks, std::vector<Pin>& pins) {
  const auto self = std::this_thread::get_id();
  std::vector<Slot*> slots;
  for (const std::size_t chunk : chunks) {
    slots.push_back(find(chunk));
    if (slots.back() != nullptr) {
      slots.back()->holders.push_back(self);  // so that it is not displaced for one of the others
    }
  }
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (slots[i] == nullptr) {
      slots[i] = most_dispensable();
      slots[i]->holders.push_back(self);
      slots[i]->coming = chunks[i];
    }
    slots[i]->wanted = false;
    slots[i]->last_use = ++num_uses_;
    pins.push_back({*this, *slots[i]});
  }
}

void ChunkStream::bring_in(std::span<const Pin> pins, MutexLock& lock) {
  try {
    for (const Pin& pin : pins) {
      if (pin.slot_->coming) {
        replace(*pin.slot_, *pin.slot_->coming, lock);
      }
    }
  } catch (...) {
    for (const Pin& pin : pins) {
      pin.slot_->coming.reset();
    }
    changed_.notify_all();
    throw;
  }
}

// Who holds chunks and waits for others may keep everybody waiting, unless somebody who holds what
// it needs goes on.
void ChunkStream::wait_for_slots(std::span<const std::size_t> chunks, MutexLock& lock) {
  waiting_.push_back({std::this_thread::get_id(), chunks});
  const auto goes_on = [this](std::thread::id holder) CASTOR_REQUIRES(mutex_) {
    return std::none_of(waiting_.begin(), waiting_.end(),
                        [&](const Waiting& waiting) CASTOR_REQUIRES(mutex_) {
                          return waiting.thread == holder && !can_claim(waiting.chunks);
                        });
  };
  const bool progress = std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.busy || std::any_of(slot.holders.begin(), slot.holders.end(), goes_on);
  });
  if (progress) {
    changed_.wait(lock.native());
  }
  std::erase_if(waiting_, [](const Waiting& waiting) {
    return waiting.thread == std::this_thread::get_id();
  });
  if (!progress) {
    throw_no_slots(chunks);
  }
}

void ChunkStream::throw_no_slots(std::span<const std::size_t> chunks) {
  const auto absent =
      std::find_if(chunks.begin(), chunks.end(),
                   [this](auto chunk) CASTOR_REQUIRES(mutex_) { return !find(chunk); });
  const StoredChunk& chunk = chunks_[absent == chunks.end() ? chunks.front() : *absent];
  const std::size_t window = slots_.size() * slots_.front().memory.size();
  throw OutOfMemory(TierKind::kHost, padded_bytes_of(chunk), 0, window,
                    chunk.front().name() + " have to be read from NVMe, and each of the " +
                        std::to_string(slots_.size()) +
                        " slots of the window holds what is used at the same time (in one "
                        "operator), or is needed beside it; raise host_memory, or make chunks "
                        "smaller (chunk_bytes)");
}

// All of them or none: who waits holds nothing that others could wait for. Those who hold some
// already go first, and what is in the window waits for nobody.
std::vector<ChunkStream::Pin> ChunkStream::pin(std::span<const std::size_t> chunks) {
  check_process();
  std::vector<Pin> pins;  // before the locks: where it fails, they go first
  std::unique_lock turn(turn_, std::defer_lock);
  MutexLock lock(mutex_);
  const auto self = std::this_thread::get_id();
  const bool holds_some = std::any_of(slots_.begin(), slots_.end(), [self](const Slot& slot) {
    return std::find(slot.holders.begin(), slot.holders.end(), self) != slot.holders.end();
  });
  if (!holds_some && !present(chunks)) {
    lock.unlock();
    turn.lock();
    lock.lock();
  }
  while (!can_claim(chunks)) {
    wait_for_slots(chunks, lock);
  }
  claim(chunks, pins);
  if (turn.owns_lock()) {
    turn.unlock();
  }
  bring_in(pins, lock);
  return pins;
}

ChunkStream::Pin ChunkStream::pin(std::size_t chunk) {
  return std::move(pin(std::span(&chunk, 1)).front());
}

void ChunkStream::release(Slot& slot, std::thread::id holder) {
  MutexLock lock(mutex_);
  slot.holders.erase(std::find(slot.holders.begin(), slot.holders.end(), holder));
  changed_.notify_all();
  // Whoever holds it by the time that others have done with it writes it instead.
  const auto to_write = [&slot] {
    return slot.holders.empty() && slot.due && slot.changed && slot.chunk;
  };
  if (to_write()) {
    wait_for_others(slot, lock);
    if (to_write()) {
      start_write(slot, lock);
    }
  }
}

ChunkStream::Pin::~Pin() {
  try {
    release();
  } catch (...) {  // NOLINT(bugprone-empty-catch): torn() tells of it
  }
}

std::span<const std::span<std::byte>> ChunkStream::Pin::payloads() const noexcept {
  return slot_->payloads;
}

void ChunkStream::Pin::wait(StreamAccess access) {
  MutexLock lock(stream_->mutex_);
  stream_->finish_read(*slot_, lock);
  if (access == StreamAccess::kRead) {
    return;
  }
  stream_->finish_write(*slot_, lock);
  slot_->changed = true;
  slot_->due = slot_->due || access == StreamAccess::kUpdate;
}

void ChunkStream::Pin::release() {
  if (ChunkStream* const stream = std::exchange(stream_, nullptr)) {
    stream->release(*slot_, holder_);
  }
}

void ChunkStream::use(std::size_t chunk, StreamAccess access, const Work& work) {
  Pin held = pin(chunk);
  held.wait(access);
  work(held.payloads());
  held.release();
}

void ChunkStream::prefetch(std::size_t chunk) {
  check_process();
  MutexLock lock(mutex_);
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
  const MutexLock lock(mutex_);
  for (Slot& slot : slots_) {
    slot.wanted = false;
  }
}

void ChunkStream::flush() {
  check_process();
  MutexLock lock(mutex_);
  std::exception_ptr first;
  const auto attempt = [&](void (ChunkStream::*part)(Slot&, MutexLock&), Slot& slot) {
    try {
      (this->*part)(slot, lock);
    } catch (const Error&) {
      first = first ? first : std::current_exception();
    }
  };
  for (Slot& slot : slots_) {
    slot.wanted = false;
    wait_for_others(slot, lock);
    if (!slot.changed || !slot.chunk) {
      continue;
    }
    if (slot.holders.empty()) {
      attempt(&ChunkStream::start_write, slot);
    } else {
      slot.due = true;
    }
  }
  for (Slot& slot : slots_) {
    attempt(&ChunkStream::finish_write, slot);
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

void ChunkStream::forget(std::size_t chunk) {
  check_process();
  MutexLock lock(mutex_);
  Slot* const slot = find(chunk);
  if (slot == nullptr) {
    return;
  }
  wait_for_others(*slot, lock);
  if (slot->chunk != chunk) {
    return;
  }
  if (!slot->holders.empty()) {
    throw UsageError(chunks_[chunk].front().name() +
                     " are about to change while something still reads them");
  }
  without_mutex(*slot, lock, [slot] { slot->reading.clear(); });  // waits for them
  slot->chunk.reset();
  slot->failure = nullptr;
  slot->wanted = false;
}

void ChunkStream::await_reads() {
  MutexLock lock(mutex_);
  for (Slot& slot : slots_) {
    try {
      finish_read(slot, lock);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): who uses it is told
    }
  }
}

void ChunkStream::discard(std::size_t chunk) {
  check_process();
  MutexLock lock(mutex_);
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
  check_process();
  std::size_t num_chunks = 0;
  {
    const MutexLock lock(mutex_);
    num_chunks = chunks_.size();
  }
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    discard(chunk);
  }
  torn_.store(false, std::memory_order_relaxed);
}

}  // namespace castor
