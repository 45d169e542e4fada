#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/ledger.h"

namespace castor {

/// Where a tier's bytes come from. Seam: mmap and jemalloc arenas in csrc/host, pinned and device
/// arenas in csrc/cuda, simulated ones in tests. Thread-safe.
class Arena {
 public:
  virtual ~Arena() = default;
  /// Memory of `bytes` (> 0) aligned to at least kParamAlignment, contents unspecified.
  /// Throws OutOfMemory when the operating system refuses.
  [[nodiscard]] virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void deallocate(std::byte* data, std::size_t bytes) noexcept = 0;
  /// The block stays allocated, but what it holds is not needed until it is written again: its
  /// physical memory may be given back meanwhile.
  virtual void discard(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}
  /// Where an arena withholds its blocks from processes that this one forks: children get this one.
  virtual void share_with_children(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}
  /// For reports: "jemalloc arena 3 over mmap, huge pages advised".
  [[nodiscard]] virtual std::string description() const = 0;
};

/// Owned memory of a tier: an arena's bytes and the reservation that pays for them. Move-only.
/// An empty block has data() == nullptr.
class Block {
 public:
  Block() = default;
  Block(Arena& arena, Reservation reservation);
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { reset(); }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return reservation_.bytes(); }
  [[nodiscard]] explicit operator bool() const noexcept { return data_ != nullptr; }
  void reset() noexcept;
  /// As Arena::discard.
  void discard() noexcept;
  /// As Arena::share_with_children.
  void share_with_children() noexcept;

 private:
  Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  Reservation reservation_;
};

/// A hard budget over an arena. The runtime owns one per tier. Thread-safe.
class MemoryTier {
 public:
  MemoryTier(TierKind kind, std::size_t budget, std::unique_ptr<Arena> arena)
      : ledger_(kind, budget), arena_(std::move(arena)) {}

  /// Throws OutOfMemory, with `remedy` in the message, when the budget or the arena has no room.
  [[nodiscard]] Block allocate(std::size_t bytes, const std::string& remedy) {
    return Block(*arena_, ledger_.reserve(bytes, remedy));
  }
  /// Turns bytes already reserved on ledger() into memory.
  [[nodiscard]] Block allocate(Reservation reservation) {
    return Block(*arena_, std::move(reservation));
  }

  [[nodiscard]] Ledger& ledger() noexcept { return ledger_; }
  [[nodiscard]] const Ledger& ledger() const noexcept { return ledger_; }
  [[nodiscard]] std::string description() const { return arena_->description(); }

 private:
  Ledger ledger_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace castor
