#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "core/compute_stream.h"
#include "core/ledger.h"

namespace castor {

/// Source of a tier's bytes. Seam: mmap and jemalloc arenas in csrc/host, pinned and device arenas
/// in csrc/cuda, simulated ones in tests. Thread-safe.
///
/// Memory that a device uses in the order of its streams is taken and given back with the stream
/// whose order counts. For all other memory the stream has no meaning.
class Arena {
 public:
  virtual ~Arena() = default;
  /// Returns memory of `bytes` (> 0), aligned to at least kParamAlignment, contents unspecified.
  /// Throws OutOfMemory when the operating system refuses.
  [[nodiscard]] virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void deallocate(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Returns memory that work given to `stream` from now on may use at once.
  [[nodiscard]] virtual std::byte* allocate_on(std::size_t bytes, StreamId /*stream*/) {
    return allocate(bytes);
  }
  /// Frees a block that work given to `stream` so far may still use: the next user of its memory is
  /// ordered behind that work.
  virtual void deallocate_behind(std::byte* data, std::size_t bytes, StreamId /*stream*/) noexcept {
    deallocate(data, bytes);
  }
  /// Notes that `stream` uses the block too, beside the stream that orders it
  /// (Tensor.record_stream).
  virtual void add_user(const std::byte* /*data*/, StreamId /*stream*/) {}
  /// Makes `stream` wait for the work that the block's users have been given so far, and forgets
  /// those users.
  virtual void await_users(const std::byte* /*data*/, StreamId /*stream*/) {}
  /// Gives freed blocks back until those that the arena keeps take at most `keep` bytes. A kept
  /// block that serves the next allocation, of `next` bytes, does not count; 0: none is expected.
  virtual void trim(std::size_t /*keep*/, std::size_t /*next*/) noexcept {}
  /// Tells the arena that the block's contents are not needed until the block is written again. The
  /// block stays allocated, but its physical memory may be given back meanwhile.
  virtual void discard(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}
  /// Shares the block with forked child processes, where the arena withholds its blocks from them.
  virtual void share_with_children(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}
  /// Returns whether other processes use the same memory: what is written to a block is theirs too.
  [[nodiscard]] virtual bool shared_by_processes() const noexcept { return false; }
  /// Returns a description for reports: "jemalloc arena 3 over mmap, huge pages advised".
  [[nodiscard]] virtual std::string description() const = 0;
};

/// Owned memory of a tier: an arena's bytes and the reservation that pays for them. If the tier has
/// a stream, the stream orders the block. Work that the stream is given after the block was made
/// may use it, and its memory is reused behind the work given before the block is destroyed.
/// Move-only. An empty block has data() == nullptr.
class Block {
 public:
  Block() = default;
  /// Allocates the reserved bytes from `arena`. `stream`: nullptr for memory that no stream orders.
  /// Arena and stream outlive the block.
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
  /// Pays for the block with another reservation of as many bytes from now on, and releases the one
  /// that paid before.
  void pay_with(Reservation reservation) noexcept;
  /// Discards the block's contents (Arena::discard).
  void discard() noexcept;
  /// Shares the block with child processes (Arena::share_with_children).
  void share_with_children() noexcept;
  /// Notes another stream that uses the block (Arena::add_user).
  void add_user(StreamId stream) const;
  /// Makes the block's stream wait for its other users (Arena::await_users).
  void await_users() const;

 private:
  Arena* arena_ = nullptr;
  const ComputeStream* stream_ = nullptr;
  std::byte* data_ = nullptr;
  Reservation reservation_;
};

/// Hard budget over an arena. When a block is made, the arena keeps no more bytes of freed blocks
/// than the budget has left. The runtime owns one per tier. Thread-safe.
class MemoryTier {
 public:
  /// Makes a tier with a budget of its own. `stream` orders the use of the tier's memory; nullptr
  /// where nothing computes by itself.
  MemoryTier(TierKind kind, std::size_t budget, std::unique_ptr<Arena> arena,
             std::shared_ptr<const ComputeStream> stream = nullptr)
      : ledger_(kind, budget), stream_(std::move(stream)), arena_(std::move(arena)) {}

  /// Makes a tier of a budget that others take from too; `owner` is that of its Ledger.
  MemoryTier(std::shared_ptr<Budget> budget, std::string owner, std::unique_ptr<Arena> arena,
             std::shared_ptr<const ComputeStream> stream = nullptr)
      : ledger_(std::move(budget), std::move(owner)),
        stream_(std::move(stream)),
        arena_(std::move(arena)) {}

  /// Allocates a block. Throws OutOfMemory, with `remedy` in the message, when the budget or the
  /// arena has no room.
  [[nodiscard]] Block allocate(std::size_t bytes, const std::string& remedy) {
    return allocate(ledger_.reserve(bytes, remedy));
  }
  /// Turns bytes already reserved on ledger() into memory.
  [[nodiscard]] Block allocate(Reservation reservation) {
    arena_->trim(ledger_.available(), reservation.bytes());
    return Block(*arena_, std::move(reservation), stream_.get());
  }

  /// Gives freed blocks back until those that the arena keeps take at most `keep` bytes.
  void trim(std::size_t keep) noexcept { arena_->trim(keep, 0); }

  [[nodiscard]] Ledger& ledger() noexcept { return ledger_; }
  [[nodiscard]] const Ledger& ledger() const noexcept { return ledger_; }
  /// Same as Arena::shared_by_processes.
  [[nodiscard]] bool shared_by_processes() const noexcept { return arena_->shared_by_processes(); }
  [[nodiscard]] std::string description() const { return arena_->description(); }
  /// Returns the stream that orders the tier's memory now.
  [[nodiscard]] StreamId stream() const noexcept { return stream_ ? stream_->id() : StreamId{}; }

 private:
  Ledger ledger_;
  const std::shared_ptr<const ComputeStream> stream_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace castor
