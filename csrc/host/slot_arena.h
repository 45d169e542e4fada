#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/memory_tier.h"
#include "core/mutex.h"

namespace castor {

/// The device arena of the CPU "device". It keeps freed blocks for the next request of the same
/// size, because chunk slots come in few sizes.
///
/// A freed slot is neither unmapped nor written to until it is handed out again, or until trim() or
/// destruction gives it back upstream. A stale pointer into it reads the old bytes, as it would on
/// a GPU, and never faults. That is part of the contract. It is also why the arena does not trim by
/// itself when upstream is out of memory: the error then names the free slots of other sizes.
///
/// Free slots stay resident and are not charged to any Ledger. A tier trims them to the rest of its
/// budget whenever it makes a block, so that slots of several sizes do not add up. The runtime
/// trims them to what non-model data takes or a plan leaves.
///
/// Memory that malloc keeps of freed activations is resident beside that. Giving it back
/// (malloc_trim) whenever a slot is made costs a step in a tight budget 18%, in page faults.
///
/// Owned by its MemoryTier; every block must be given back before the arena is destroyed.
/// Thread-safe; calls upstream without holding its mutex.
class SlotArena final : public Arena {
 public:
  /// Takes over `upstream`. `tier` names the memory in OutOfMemory.
  explicit SlotArena(std::unique_ptr<Arena> upstream, TierKind tier = TierKind::kDevice);
  ~SlotArena() override;

  /// Returns the slot of this size that was freed last, else a new block. Throws what upstream
  /// throws; OutOfMemory says in addition how many bytes free slots hold.
  [[nodiscard]] std::byte* allocate(std::size_t bytes) override;
  void deallocate(std::byte* data, std::size_t bytes) noexcept override;
  void share_with_children(std::byte* data, std::size_t bytes) noexcept override {
    upstream_->share_with_children(data, bytes);
  }
  [[nodiscard]] std::string description() const override;

  /// Gives free slots back upstream, the largest first.
  void trim(std::size_t keep, std::size_t next) noexcept override;

  [[nodiscard]] std::size_t free_bytes() const;

 private:
  /// Blocks of one size. Invariant: free.capacity() >= num_blocks, so that a deallocation, which
  /// must not throw, never grows the list.
  struct Slots {
    std::vector<std::byte*> free;
    std::size_t num_blocks = 0;
  };

  [[nodiscard]] std::byte* new_block(std::size_t bytes);
  /// Takes out one slot that trim gives back, and sets `bytes` to its size. Returns nullptr when
  /// the slots that are left may stay.
  [[nodiscard]] std::byte* take_excess(std::size_t keep, std::size_t next,
                                       std::size_t& bytes) noexcept;

  const std::unique_ptr<Arena> upstream_;
  const TierKind tier_;
  mutable Mutex mutex_;
  std::map<std::size_t, Slots> slots_ CASTOR_GUARDED_BY(mutex_);  // an entry, once made, stays
};

}  // namespace castor
