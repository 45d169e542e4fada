#include "io/chunk_stream.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

std::size_t bytes_of(const StreamItem& item) {
  std::size_t bytes = 0;
  for (const StreamItem::Part& part : item.parts) {
    bytes += part.payload->padded_bytes();
  }
  return bytes;
}

std::size_t largest(std::span<const StreamItem> items) {
  std::size_t bytes = 0;
  for (const StreamItem& item : items) {
    bytes = std::max(bytes, bytes_of(item));
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

bool reads(StreamAccess access) { return access != StreamAccess::kWrite; }
bool writes(StreamAccess access) { return access != StreamAccess::kRead; }

}  // namespace

std::size_t StreamProgress::count(ItemProgress progress) const noexcept {
  return static_cast<std::size_t>(std::count(items.begin(), items.end(), progress));
}

std::string StreamProgress::summary() const {
  return std::to_string(count(ItemProgress::kDone)) + " of " + std::to_string(items.size()) +
         " chunks are updated, " + std::to_string(count(ItemProgress::kStarted)) + " half-way, " +
         std::to_string(count(ItemProgress::kUntouched)) + " as before";
}

/// Memory of one item: its payloads one after another, and the transfers on them.
struct ChunkStream::Slot {
  std::span<std::byte> memory;
  std::vector<std::span<std::byte>> padded;    // as transferred
  std::vector<std::span<std::byte>> payloads;  // as worked on
  std::vector<Transfer> reading;
  std::vector<Transfer> writing;
  const StreamItem* writing_item = nullptr;  // null: no write to wait for
  std::size_t writing_index = 0;
};

/// One call of process(). Its destructor, through the transfers', waits for what is in flight.
class ChunkStream::Pass {
 public:
  Pass(ChunkStream& stream, std::span<const StreamItem> items, StreamProgress& progress)
      : stream_(stream), items_(items), progress_(progress) {
    const std::size_t count = stream.num_slots(items);
    const std::size_t slot_bytes = largest(items);
    for (std::size_t i = 0; i < count; ++i) {
      slots_.push_back({.memory = stream.ring_.subspan(i * slot_bytes, slot_bytes)});
    }
  }

  void run(const Work& work) {
    for (std::size_t i = 0; i < items_.size(); ++i) {
      // The next item is on its way before this one is waited for: the device never runs dry.
      read_up_to(std::min(i + ahead(), items_.size() - 1));
      Slot& slot = slot_of(i);
      finish_read(i, slot);
      progress_.items[i] = ItemProgress::kStarted;
      work(i, slot.payloads);
      start_write(i, slot);
    }
    for (std::size_t i = items_.size() - std::min(items_.size(), slots_.size()); i < items_.size();
         ++i) {
      finish_write(slot_of(i));
    }
  }

  /// After an error: what was on its way to NVMe and arrives there counts.
  void settle() noexcept {
    for (Slot& slot : slots_) {
      try {
        finish_write(slot);
      } catch (const Error&) {
        // The first error is the one that is reported; this item stays kStarted.
      }
    }
  }

 private:
  [[nodiscard]] Slot& slot_of(std::size_t item) { return slots_[item % slots_.size()]; }

  /// Items to read ahead. One slot is left for the write of the item before, if there are 3.
  [[nodiscard]] std::size_t ahead() const {
    return slots_.size() == 1 ? 0 : std::max<std::size_t>(1, slots_.size() - 2);
  }

  void read_up_to(std::size_t last) {
    for (; next_read_ <= last; ++next_read_) {
      Slot& slot = slot_of(next_read_);
      finish_write(slot);
      start_read(items_[next_read_], slot);
    }
  }

  void start_read(const StreamItem& item, Slot& slot) {
    slot.padded.clear();
    slot.payloads.clear();
    std::size_t offset = 0;
    for (const StreamItem::Part& part : item.parts) {
      slot.padded.push_back(slot.memory.subspan(offset, part.payload->padded_bytes()));
      slot.payloads.push_back(slot.padded.back().first(part.payload->bytes()));
      offset += part.payload->padded_bytes();
      if (reads(part.access)) {
        slot.reading.push_back(part.payload->start_read(stream_.queue_, slot.padded.back()));
      }
    }
  }

  void finish_read(std::size_t index, Slot& slot) {
    const StreamItem& item = items_[index];
    for (Transfer& transfer : slot.reading) {
      transfer.wait();
    }
    slot.reading.clear();
    if (stream_.verification_ == Verification::kOff) {
      return;
    }
    for (std::size_t i = 0; i < item.parts.size(); ++i) {
      if (reads(item.parts[i].access)) {
        item.parts[i].payload->check(stream_.executor_, stream_.queue_, slot.padded[i]);
      }
    }
  }

  void start_write(std::size_t index, Slot& slot) {
    const StreamItem& item = items_[index];
    for (std::size_t i = 0; i < item.parts.size(); ++i) {
      if (writes(item.parts[i].access)) {
        slot.writing.push_back(item.parts[i].payload->start_write(
            stream_.queue_, stream_.executor_, slot.padded[i], stream_.verification_));
      }
    }
    // Only now: an item of which a write could not be started never counts as done.
    slot.writing_item = &item;
    slot.writing_index = index;
  }

  void finish_write(Slot& slot) {
    if (slot.writing_item == nullptr) {
      return;
    }
    const StreamItem& item = *std::exchange(slot.writing_item, nullptr);
    std::vector<Transfer> writing = std::exchange(slot.writing, {});
    std::size_t next = 0;
    for (const StreamItem::Part& part : item.parts) {
      if (writes(part.access)) {
        writing[next++].wait();
        part.payload->finish_write();
      }
    }
    progress_.items[slot.writing_index] = ItemProgress::kDone;
  }

  ChunkStream& stream_;
  std::span<const StreamItem> items_;
  StreamProgress& progress_;
  std::size_t next_read_ = 0;
  std::vector<Slot> slots_;  // last: its transfers end before anything else goes
};

ChunkStream::ChunkStream(TransferQueue& queue, Executor& executor, std::span<std::byte> ring,
                         std::size_t alignment, Verification verification)
    : queue_(queue),
      executor_(executor),
      ring_(align(ring, alignment)),
      verification_(verification) {}

std::size_t ChunkStream::num_slots(std::span<const StreamItem> items) const {
  const std::size_t slot_bytes = largest(items);
  return slot_bytes == 0 ? 1 : std::min(kMaxSlots, ring_.size() / slot_bytes);
}

std::size_t ChunkStream::ring_bytes(std::span<const StreamItem> items, std::size_t num_slots,
                                    std::size_t alignment) {
  return largest(items) * num_slots + alignment - 1;
}

void ChunkStream::process(std::span<const StreamItem> items, const Work& work,
                          StreamProgress& progress) {
  progress.items.assign(items.size(), ItemProgress::kUntouched);
  if (items.empty()) {
    return;
  }
  if (num_slots(items) == 0) {
    throw InvalidArgument("the NVMe ring has " + format_bytes(ring_.size()) +
                          ", and the largest chunk needs " + format_bytes(largest(items)) +
                          ": give the host tier more memory, or make chunks smaller");
  }
  Pass pass(*this, items, progress);
  try {
    pass.run(work);
  } catch (...) {
    pass.settle();
    throw;
  }
}

}  // namespace castor
