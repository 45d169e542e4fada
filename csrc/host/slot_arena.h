#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/memory_tier.h"
#include "core/mutex.h"

namespace castor {

/// The device arena of the CPU "device": keeps freed blocks for the next request of the same size,
/// as chunk slots come in few sizes.
///
/// A freed slot is neither unmapped nor written to until it is handed out again, or until trim() or
/// destruction gives it back upstream: a stale pointer into it reads the old bytes, as it would on
/// a GPU, and never faults. That is part of the contract. It is also why the arena does not trim by
/// itself when upstream is out of memory: free slots of other sizes are then named in the error.
/// Free slots stay resident and are not charged to any Ledger: a tier trims them to what its budget
/// has left whenever it makes a block, so that slots of several sizes do not add up, and the
/// runtime to what non-model data takes or a plan leaves to it. What malloc keeps of freed
/// activations is resident beside that: to have it given back (malloc_trim) whenever a slot is made
/// costs a step in a tight budget 18%, in page faults.
///
/// Owned by its MemoryTier; every block must be given back before the arena is destroyed.
/// Thread-safe; calls upstream without holding its mutex.
class SlotArena final : public Arena {
 public:
  /// `tier` names the memory in OutOfMemory.
  explicit SlotArena(std::unique_ptr<Arena> upstream, TierKind tier = TierKind::kDevice);
  ~SlotArena() override;

  /// The slot of this size freed last, else a new block. Throws what upstream throws; OutOfMemory
  /// says in addition what free slots hold.
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override;
  void deallocate(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] std::string description() const override;

  /// The largest go first.
  void trim(std::size_t keep, std::size_t next) noexcept override;

  [[nodiscard]] std::size_t free_bytes() const;

 private:
  /// All blocks of one size. Invariant: free.capacity() >= num_blocks, so that a deallocation,
  /// which must not throw, never grows the list.
  struct Slots {
    std::vector<std::byte*> free;
    std::size_t num_blocks = 0;
  };

  [[nodiscard]] std::byte* new_block(std::size_t bytes);
  /// Takes a slot out that trim gives back; nullptr: what is left may stay. Sets its size.
  [[nodiscard]] std::byte* take_excess(std::size_t keep, std::size_t next,
                                       std::size_t& bytes) noexcept;

  const std::unique_ptr<Arena> upstream_;
  const TierKind tier_;
  mutable Mutex mutex_;
  std::map<std::size_t, Slots> slots_ CASTOR_GUARDED_BY(mutex_);  // an entry, once made, stays
};

}  // namespace castor
