#include "io/chunk_stream.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

std::size_t bytes_of(const StoredChunk& chunk) {
  std::size_t bytes = 0;
  for (const StoredPayload& payload : chunk) {
    bytes += payload.padded_bytes();
  }
  return bytes;
}

std::size_t largest(const std::vector<StoredChunk>& chunks) {
  std::size_t bytes = 0;
  for (const StoredChunk& chunk : chunks) {
    bytes = std::max(bytes, bytes_of(chunk));
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

struct ChunkStream::Slot {
  std::span<std::byte> memory;
  std::optional<std::size_t> chunk;  // whose payloads are here, or on their way
  bool wanted = false;               // announced, not used yet
  bool changed = false;              // differs from NVMe, and no write of it is under way
  std::uint64_t last_use = 0;
  std::vector<std::span<std::byte>> padded;    // as transferred
  std::vector<std::span<std::byte>> payloads;  // as worked on
  std::vector<IoTransfer> reading;             // empty: nothing to wait for
  std::vector<IoTransfer> writing;
};

ChunkStream::ChunkStream(std::vector<StoredChunk> chunks, TransferQueue& queue, Executor& executor,
                         std::span<std::byte> memory, std::size_t alignment,
                         Verification verification)
    : queue_(queue), executor_(executor), verification_(verification), chunks_(std::move(chunks)) {
  const std::span<std::byte> window = align(memory, alignment);
  const std::size_t slot_bytes = largest(chunks_);
  if (slot_bytes == 0) {
    return;
  }
  for (std::size_t i = 0; i < std::min(kMaxSlots, window.size() / slot_bytes); ++i) {
    slots_.push_back({.memory = window.subspan(i * slot_bytes, slot_bytes)});
  }
  if (slots_.empty()) {
    throw InvalidArgument("the window on NVMe has " + format_bytes(window.size()) +
                          ", and the largest chunk needs " + format_bytes(slot_bytes) +
                          ": give the host tier more memory, or make chunks smaller");
  }
}

// The slots' transfers wait in their destructors.
ChunkStream::~ChunkStream() = default;

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
  const auto found = std::find_if(slots_.begin(), slots_.end(),
                                  [chunk](const Slot& slot) { return slot.chunk == chunk; });
  return found == slots_.end() ? nullptr : &*found;
}

// Empty slots first; those that were announced and not used last.
ChunkStream::Slot& ChunkStream::most_dispensable() {
  const auto rank = [](const Slot& slot) {
    return std::tuple(slot.wanted, slot.chunk.has_value(), slot.last_use);
  };
  return *std::min_element(slots_.begin(), slots_.end(),
                           [&](const Slot& a, const Slot& b) { return rank(a) < rank(b); });
}

/// Leaves the slot empty, what it held on NVMe.
void ChunkStream::clear(Slot& slot) {
  if (slot.changed) {
    start_write(slot);
  }
  finish_write(slot);
  slot.reading.clear();
  slot.chunk.reset();
  slot.wanted = false;
}

void ChunkStream::load(Slot& slot, std::size_t chunk) {
  clear(slot);
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
      slot.reading.push_back(payload.start_read(queue_, slot.padded.back()));
      counts_.read_bytes += payload.padded_bytes();
    }
  }
  slot.chunk = chunk;
}

void ChunkStream::finish_read(Slot& slot) {
  if (slot.reading.empty()) {
    return;
  }
  try {
    for (IoTransfer& transfer : slot.reading) {
      transfer.wait();
    }
    if (verification_ == Verification::kOn) {
      for (std::size_t i = 0; i < slot.padded.size(); ++i) {
        chunks_[*slot.chunk][i].check(executor_, queue_, slot.padded[i]);
      }
    }
  } catch (...) {
    slot.reading.clear();
    slot.chunk.reset();
    slot.wanted = false;
    throw;
  }
  slot.reading.clear();
}

// A slot that could not be written is empty afterwards, and its chunk torn: whoever changed it may
// long have been told that all was well.
void ChunkStream::start_write(Slot& slot) {
  slot.changed = false;
  StoredChunk& chunk = chunks_[*slot.chunk];
  try {
    for (std::size_t i = 0; i < chunk.size(); ++i) {
      slot.writing.push_back(
          chunk[i].start_write(queue_, executor_, slot.padded[i], verification_));
      counts_.written_bytes += chunk[i].padded_bytes();
    }
  } catch (...) {
    slot.writing.clear();
    slot.chunk.reset();
    torn_.store(true, std::memory_order_relaxed);
    throw;
  }
}

void ChunkStream::finish_write(Slot& slot) {
  std::vector<IoTransfer> writing = std::exchange(slot.writing, {});
  if (writing.empty()) {
    return;
  }
  StoredChunk& chunk = chunks_[*slot.chunk];
  try {
    for (std::size_t i = 0; i < writing.size(); ++i) {
      writing[i].wait();
      chunk[i].finish_write();
    }
  } catch (...) {
    slot.chunk.reset();
    torn_.store(true, std::memory_order_relaxed);
    throw;
  }
}

void ChunkStream::prefetch(std::size_t chunk) {
  const std::lock_guard lock(mutex_);
  if (Slot* const here = find(chunk)) {
    here->wanted = true;
    return;
  }
  Slot& slot = most_dispensable();
  if (slot.wanted) {
    return;
  }
  load(slot, chunk);
  slot.wanted = true;
}

void ChunkStream::use(std::size_t chunk, StreamAccess access, const Work& work) {
  const std::lock_guard lock(mutex_);
  Slot* slot = find(chunk);
  if (slot == nullptr) {
    slot = &most_dispensable();
    load(*slot, chunk);
  }
  finish_read(*slot);
  slot->wanted = false;
  slot->last_use = ++num_uses_;
  if (access != StreamAccess::kRead) {
    finish_write(*slot);
    slot->changed = true;
  }
  work(slot->payloads);
  if (access == StreamAccess::kUpdate) {
    start_write(*slot);
  }
}

void ChunkStream::flush() {
  const std::lock_guard lock(mutex_);
  std::exception_ptr first;
  const auto attempt = [&](void (ChunkStream::*part)(Slot&), Slot& slot) {
    try {
      (this->*part)(slot);
    } catch (const Error&) {
      first = first ? first : std::current_exception();
    }
  };
  for (Slot& slot : slots_) {
    slot.wanted = false;
    if (slot.changed) {
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

void ChunkStream::discard_all() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    slot = Slot{.memory = slot.memory};  // waits for its transfers
  }
  for (StoredChunk& chunk : chunks_) {
    for (StoredPayload& payload : chunk) {
      payload.discard();
    }
  }
  torn_.store(false, std::memory_order_relaxed);
}

}  // namespace castor
