#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "core/compute_stream.h"
#include "core/ledger.h"

namespace castor {

/// Where a tier's bytes come from. Seam: mmap and jemalloc arenas in csrc/host, pinned and device
/// arenas in csrc/cuda, simulated ones in tests. Thread-safe.
///
/// Memory that a device uses in the order of its streams is taken and given back with the stream
/// whose order counts; for all other memory the stream has no meaning.
class Arena {
 public:
  virtual ~Arena() = default;
  /// Memory of `bytes` (> 0) aligned to at least kParamAlignment, contents unspecified.
  /// Throws OutOfMemory when the operating system refuses.
  [[nodiscard]] virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void deallocate(std::byte* data, std::size_t bytes) noexcept = 0;
  /// What `stream` is given from now on may use the block at once.
  [[nodiscard]] virtual std::byte* allocate_on(std::size_t bytes, StreamId /*stream*/) {
    return allocate(bytes);
  }
  /// What `stream` has been given so far may still use the block: its memory's next user comes
  /// behind that.
  virtual void deallocate_behind(std::byte* data, std::size_t bytes, StreamId /*stream*/) noexcept {
    deallocate(data, bytes);
  }
  /// `stream` uses the block too, beside the one that orders it (Tensor.record_stream).
  virtual void add_user(const std::byte* /*data*/, StreamId /*stream*/) {}
  /// Makes `stream` wait for what the block's users have been given so far, and forgets those.
  virtual void await_users(const std::byte* /*data*/, StreamId /*stream*/) {}
  /// A block of `next` bytes is asked for next; 0: none. What the arena keeps of freed blocks for
  /// later ones, beside one that serves that, may take `keep` bytes at most: the rest goes back.
  virtual void trim(std::size_t /*keep*/, std::size_t /*next*/) noexcept {}
  /// The block stays allocated, but what it holds is not needed until it is written again: its
  /// physical memory may be given back meanwhile.
  virtual void discard(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}
  /// Where an arena withholds its blocks from processes that this one forks: children get this one.
  virtual void share_with_children(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}
  /// For reports: "jemalloc arena 3 over mmap, huge pages advised".
  [[nodiscard]] virtual std::string description() const = 0;
};

/// Owned memory of a tier: an arena's bytes and the reservation that pays for them. Ordered with
/// the tier's stream, if it has one: usable by what that is given after the block was made, and
/// lent out again behind what that has been given when the block goes. Move-only. An empty block
/// has data() == nullptr.
class Block {
 public:
  Block() = default;
  /// `stream`: nullptr for memory that no stream orders. Both outlive the block.
  Block(Arena& arena, Reservation reservation, const ComputeStream* stream = nullptr);
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
  /// As Arena::add_user.
  void add_user(StreamId stream) const;
  /// As Arena::await_users: the block's stream waits.
  void await_users() const;

 private:
  Arena* arena_ = nullptr;
  const ComputeStream* stream_ = nullptr;
  std::byte* data_ = nullptr;
  Reservation reservation_;
};

/// A hard budget over an arena, which keeps no more of freed blocks than the budget has left when
/// a block is made. The runtime owns one per tier. Thread-safe.
class MemoryTier {
 public:
  /// `stream`: orders the use of the tier's memory; nullptr where nothing computes by itself.
  MemoryTier(TierKind kind, std::size_t budget, std::unique_ptr<Arena> arena,
             std::shared_ptr<const ComputeStream> stream = nullptr)
      : ledger_(kind, budget), stream_(std::move(stream)), arena_(std::move(arena)) {}

  /// Of a budget that others take from too; `owner` as Ledger's.
  MemoryTier(std::shared_ptr<Budget> budget, std::string owner, std::unique_ptr<Arena> arena,
             std::shared_ptr<const ComputeStream> stream = nullptr)
      : ledger_(std::move(budget), std::move(owner)),
        stream_(std::move(stream)),
        arena_(std::move(arena)) {}

  /// Throws OutOfMemory, with `remedy` in the message, when the budget or the arena has no room.
  [[nodiscard]] Block allocate(std::size_t bytes, const std::string& remedy) {
    return allocate(ledger_.reserve(bytes, remedy));
  }
  /// Turns bytes already reserved on ledger() into memory.
  [[nodiscard]] Block allocate(Reservation reservation) {
    arena_->trim(ledger_.available(), reservation.bytes());
    return Block(*arena_, std::move(reservation), stream_.get());
  }

  /// What the arena keeps of freed blocks may take `keep` bytes at most.
  void trim(std::size_t keep) noexcept { arena_->trim(keep, 0); }

  [[nodiscard]] Ledger& ledger() noexcept { return ledger_; }
  [[nodiscard]] const Ledger& ledger() const noexcept { return ledger_; }
  [[nodiscard]] std::string description() const { return arena_->description(); }
  /// What orders the tier's memory, now.
  [[nodiscard]] StreamId stream() const noexcept { return stream_ ? stream_->id() : StreamId{}; }

 private:
  Ledger ledger_;
  const std::shared_ptr<const ComputeStream> stream_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace castor
