#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "core/memory_tier.h"

namespace castor {

/// Memory for a process's own copies of payloads whose storage other processes use too
/// (Payload::take_copy). The host tier pays for each copy. The arena keeps up to `kept` bytes of
/// copies that were given back, for which nothing pays: on a GPU their pages are locked, which
/// takes far longer than a copy is needed. Thread-safe.
class OwnCopies {
 public:
  /// `arena`: one that keeps freed blocks until they are trimmed (SlotArena).
  OwnCopies(std::shared_ptr<MemoryTier> host, std::unique_ptr<Arena> arena, std::size_t kept)
      : host_(std::move(host)), arena_(std::move(arena)), kept_(kept) {}

  /// Returns a block for a copy. Throws OutOfMemory where host_memory has no room.
  [[nodiscard]] Block take(std::size_t bytes) {
    Reservation room = host_->ledger().reserve(
        bytes,
        "a rank has values of its own, in a copy, until the ranks have brought theirs together; "
        "raise host_memory, or make chunks smaller (chunk_bytes)");
    arena_->trim(std::min<std::size_t>(kept_, host_->ledger().available()), bytes);
    return {*arena_, std::move(room)};
  }
  void give_back(Block copy) noexcept {
    copy.reset();
    arena_->trim(kept_, 0);
  }
  /// Keeps no block that was given back from now on.
  void end() noexcept {
    kept_ = 0;
    arena_->trim(0, 0);
  }

 private:
  const std::shared_ptr<MemoryTier> host_;
  const std::unique_ptr<Arena> arena_;
  std::atomic<std::size_t> kept_;
};

}  // namespace castor
