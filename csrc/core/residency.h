#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/chunk_layout.h"
#include "core/mutex.h"
#include "core/placement.h"

namespace castor {

class Residency;

/// Next use of a chunk that this step will not touch again.
inline constexpr std::uint64_t kNeverUsed = ~std::uint64_t{0};

/// Owner of a pin: a module, or an operator that took the addresses of the chunk's memory.
enum class PinKind : std::uint8_t { kModule, kOperator };

/// Pin that keeps a chunk on the device while it lives. An operator's pin also keeps all payloads
/// of the chunk where they are. Move-only; made by Residency::pin.
class Pin {
 public:
  Pin() = default;
  Pin(Pin&& other) noexcept
      : residency_(std::exchange(other.residency_, nullptr)),
        chunk_(other.chunk_),
        kind_(other.kind_) {}
  Pin& operator=(Pin&& other) noexcept {
    if (this != &other) {
      release();
      residency_ = std::exchange(other.residency_, nullptr);
      chunk_ = other.chunk_;
      kind_ = other.kind_;
    }
    return *this;
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  ~Pin() { release(); }
  void release() noexcept;

 private:
  friend class Residency;
  Pin(Residency& residency, ChunkId chunk, PinKind kind) noexcept
      : residency_(&residency), chunk_(chunk), kind_(kind) {}
  Residency* residency_ = nullptr;
  ChunkId chunk_{};
  PinKind kind_ = PinKind::kModule;
};

/// Account of the chunks that are on the device, in slots or for good, of their pins, and of the
/// order in which they leave. An account only: no memory, no copies, no time. The chunk manager
/// keeps one and moves bytes as it says; the planner and the simulator run a simulated one
/// (DryRun). Not thread-safe; outlives its pins. O(log chunks).
/// Evictions: the furthest next use goes first (Belady 1966); ties go by id, so that every run
/// takes the same decisions. Invariants: a pinned chunk is resident; a chunk may leave if and only
/// if it is in a slot, streams (Placement::kStream) and is not pinned.
class Residency {
 public:
  /// Begins with nothing in a slot. Throws InvalidArgument where there is not one placement for
  /// each chunk.
  Residency(const ChunkLayout& layout, std::span<const Placement> placements);
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  [[nodiscard]] Placement placement(ChunkId chunk) const { return at(chunk).placement; }
  [[nodiscard]] bool on_device(ChunkId chunk) const {
    return placement(chunk) == Placement::kDevice;
  }
  [[nodiscard]] bool in_slot(ChunkId chunk) const { return at(chunk).in_slot; }
  [[nodiscard]] bool resident(ChunkId chunk) const { return on_device(chunk) || in_slot(chunk); }
  [[nodiscard]] std::uint32_t pins(ChunkId chunk) const { return at(chunk).pins; }
  /// Returns the number of the chunk's pins that are operators'.
  [[nodiscard]] std::uint32_t operator_pins(ChunkId chunk) const { return at(chunk).operator_pins; }
  [[nodiscard]] std::size_t num_operator_pins() const noexcept { return num_operator_pins_; }
  [[nodiscard]] std::uint64_t next_use(ChunkId chunk) const { return at(chunk).next_use; }
  /// Returns the device bytes that the chunk's slot takes, or would take.
  [[nodiscard]] std::size_t capacity(ChunkId chunk) const { return at(chunk).capacity_bytes; }

  /// Returns the bytes of all slots.
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  /// Returns the bytes of the slots whose chunks are pinned.
  [[nodiscard]] std::size_t pinned_bytes() const noexcept { return pinned_bytes_; }
  /// Returns the bytes of the slots that stay: pinned ones, and those of kept chunks (kKeep) from
  /// their first pin on.
  [[nodiscard]] std::size_t held_bytes() const noexcept { return held_bytes_; }
  [[nodiscard]] bool held(ChunkId chunk) const { return at(chunk).pins > 0 || at(chunk).kept; }

  /// Sets the chunk's next use, which orders evictions once the chunk may leave.
  void set_next_use(ChunkId chunk, std::uint64_t next_use);
  /// Puts the chunk into a slot. Requires that it is not resident.
  void take_slot(ChunkId chunk);
  /// Takes the chunk out of its slot. Requires that it is in a slot and not pinned.
  void give_up_slot(ChunkId chunk) noexcept;
  /// Pins the chunk. Requires that it is resident.
  [[nodiscard]] Pin pin(ChunkId chunk, PinKind kind = PinKind::kModule);
  /// Makes the chunk resident on the device until it is demoted. Requires that it streams and is in
  /// no slot.
  void promote(ChunkId chunk);
  /// Makes the chunk stream from now on, from a slot; its pins stay. Requires that it was promoted.
  void demote(ChunkId chunk);
  [[nodiscard]] bool promoted(ChunkId chunk) const { return at(chunk).promoted; }

  /// Calls `evict` for one chunk after the other until enough(), or until no chunk may leave whose
  /// next use is `horizon` or later. Returns whether it is enough. `evict` gives up the chunk's
  /// slot, or throws.
  template <typename Enough, typename Evict>
  bool evict_until(Enough&& enough, std::uint64_t horizon, Evict&& evict) {
    while (!enough()) {
      if (evictable_.empty() || evictable_.rbegin()->first < horizon) {
        return false;
      }
      evict(chunk_of(*evictable_.rbegin()));
    }
    return true;
  }
  [[nodiscard]] bool slots_fit(std::size_t more_bytes, std::size_t cap_bytes) const noexcept {
    return slot_bytes_ + more_bytes <= cap_bytes;
  }
  /// Returns whether evicting chunks whose next use is `horizon` or later would make `more_bytes`
  /// fit under the cap. Changes nothing.
  [[nodiscard]] bool could_fit(std::size_t more_bytes, std::size_t cap_bytes,
                               std::uint64_t horizon) const;

 private:
  friend class Pin;
  struct Chunk {
    std::size_t capacity_bytes = 0;
    std::uint64_t next_use = kNeverUsed;
    std::uint32_t pins = 0;
    std::uint32_t operator_pins = 0;
    Placement placement = Placement::kStream;
    bool in_slot = false;
    bool kept = false;  // kKeep, and pinned since it came
    bool promoted = false;
  };
  // Ordered so that the last has the furthest next use and, among equals, the lowest id.
  using Key = std::pair<std::uint64_t, std::uint32_t>;
  [[nodiscard]] static ChunkId chunk_of(const Key& key) { return ChunkId{~key.second}; }
  [[nodiscard]] Key key_of(ChunkId chunk) const {
    return {at(chunk).next_use, ~static_cast<std::uint32_t>(chunk)};
  }
  [[nodiscard]] bool may_leave(ChunkId chunk) const {
    return at(chunk).in_slot && at(chunk).placement == Placement::kStream && at(chunk).pins == 0;
  }
  [[nodiscard]] const Chunk& at(ChunkId chunk) const { return chunks_[index(chunk)]; }
  void unpin(ChunkId chunk, PinKind kind) noexcept;

  std::vector<Chunk> chunks_;
  std::set<Key> evictable_;  // the chunks that may leave
  std::size_t slot_bytes_ = 0;
  std::size_t pinned_bytes_ = 0;
  std::size_t held_bytes_ = 0;
  std::size_t num_operator_pins_ = 0;
};

inline void Pin::release() noexcept {
  if (residency_ != nullptr) {
    std::exchange(residency_, nullptr)->unpin(chunk_, kind_);
  }
}

/// Pins the chunks that an access needs. Those that are resident are pinned first, so that making
/// room for the rest cannot evict them. Then each of the others is brought in and pinned.
template <typename BringIn, typename MakePin>
void pin_all(std::span<const ChunkId> needed, const Residency& residency, std::vector<Pin>* pins,
             BringIn&& bring_in, MakePin&& pin) CASTOR_NOT_ANALYZED {
  const std::size_t first = pins->size();
  for (const ChunkId chunk : needed) {
    if (residency.resident(chunk)) {
      pins->push_back(pin(chunk));
    }
  }
  if (pins->size() - first == needed.size()) {
    return;
  }
  for (const ChunkId chunk : needed) {
    if (!residency.resident(chunk)) {
      bring_in(chunk);
      pins->push_back(pin(chunk));
    }
  }
}

}  // namespace castor
