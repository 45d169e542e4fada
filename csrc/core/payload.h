#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/host_blocks.h"
#include "core/memory_tier.h"
#include "core/mutex.h"

namespace castor {

/// Kind of memory that a chunk owns besides its device slot: parameters, gradients, and the
/// optimizer's states by number (state_payload). The optimizer decides what a number means.
enum class PayloadKind : std::uint8_t { kParam, kGrad, kFirstState };

inline constexpr std::size_t kMaxStatePayloads = 6;
inline constexpr std::size_t kNumPayloadKinds = 2 + kMaxStatePayloads;

/// Returns the kind of the optimizer state `number`. Requires number < kMaxStatePayloads.
[[nodiscard]] constexpr PayloadKind state_payload(std::size_t number) noexcept {
  return static_cast<PayloadKind>(static_cast<std::size_t>(PayloadKind::kFirstState) + number);
}

[[nodiscard]] constexpr std::string_view to_string(PayloadKind kind) noexcept {
  switch (kind) {
    case PayloadKind::kParam: return "parameters";
    case PayloadKind::kGrad: return "gradients";
    case PayloadKind::kFirstState: break;
  }
  return "optimizer states";
}

/// Reference to a payload's memory that keeps up with its moves. Seam: torch storages in
/// csrc/torch.
class PayloadFollower {
 public:
  virtual ~PayloadFollower() = default;
  /// Returns false for good once nothing is left to keep up.
  [[nodiscard]] virtual bool alive() const noexcept = 0;
  /// Notes that the payload's bytes are at `address` now.
  virtual void moved(std::byte* address) noexcept = 0;
};

/// Payload of one chunk in its storage, with the tier that pays for it. Shared: tensors that users
/// hold (a state_dict, p.grad) keep the memory alive after the runtime is gone.
///
/// A payload may be away from its storage, which host_storage() returns, in memory of another tier.
/// The storage stays allocated, so that the way back cannot fail for want of memory, but its
/// contents are discarded. Whoever moves a payload copies the bytes and sees to it that nobody uses
/// them meanwhile. Followers may be added from any thread.
///
/// Other processes may use the same storage (MemoryTier::shared_by_processes). Before this process
/// writes values that are not theirs, it takes a copy of its own, which stands for the storage
/// until it is dropped.
class Payload {
 public:
  /// `copies`: memory of this process's own copies, where other processes use the storage too;
  /// nullptr where the storage is this process's alone, or the system copies what is written.
  Payload(std::shared_ptr<MemoryTier> tier, std::size_t bytes, const std::string& remedy,
          std::shared_ptr<HostBlocks> copies = nullptr)
      : tier_(std::move(tier)),
        host_(tier_->allocate(bytes, remedy)),
        copies_(std::move(copies)),
        bytes_(host_.bytes()),
        data_(host_.data()) {}
  /// Makes a payload in no memory (on NVMe, or sharded over ranks): a ParamStore has the bytes.
  explicit Payload(std::size_t bytes) noexcept : bytes_(bytes), data_(nullptr) {}

  /// Returns the address of the bytes; nullptr for a payload in no memory.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// Returns the tier that the bytes are in.
  [[nodiscard]] TierKind tier() const noexcept {
    return tier_ == nullptr ? TierKind::kNvme : (away_tier_ ? away_tier_ : tier_)->ledger().tier();
  }

  [[nodiscard]] bool away() const noexcept { return away_tier_ != nullptr; }
  /// Returns the memory in which the payload is while it is not away: its own copy where there is
  /// one, else its storage.
  [[nodiscard]] std::byte* host_storage() const noexcept {
    return copy_ ? copy_.data() : host_.data();
  }
  /// Returns the storage, which other processes may use too.
  [[nodiscard]] std::byte* storage() const noexcept { return host_.data(); }
  /// Returns whether other processes use the storage, so that writes need a copy.
  [[nodiscard]] bool needs_copies() const noexcept { return copies_ != nullptr; }
  [[nodiscard]] bool has_copy() const noexcept { return static_cast<bool>(copy_); }
  enum class CopyContents : std::uint8_t { kStorage, kZeros };
  /// Takes a copy of the storage, which begins with its contents or with zeros. No effect where
  /// there is one, or none is needed. Throws OutOfMemory.
  void take_copy(CopyContents contents);
  /// Goes back to the storage, whose contents count from now on. Requires that nothing reads or
  /// writes the copy.
  void drop_copy() noexcept;
  /// Makes the device's stream wait for other users of the payload while it is away
  /// (Block::await_users).
  void await_users() const { away_.await_users(); }
  /// Notes another stream that uses the bytes where they are now (Block::add_user).
  void add_user(StreamId stream) const { (away() ? away_ : host_).add_user(stream); }
  /// Moves the payload to `block` of `tier`, which has the bytes already, and drops its own copy.
  /// Requires !away().
  void move_to(std::shared_ptr<MemoryTier> tier, Block block) noexcept;
  /// Moves the payload back to its storage, which has the bytes already, and returns the block
  /// where they were. Requires away().
  Block move_to_host() noexcept;
  /// Lets forked processes use the payload's storage too, for a payload that outlives its session.
  void share_with_children() noexcept {
    host_.share_with_children();
    copy_.share_with_children();
  }
  /// Tells `follower` of moves from now on, until it is not alive any more.
  void add_follower(std::unique_ptr<PayloadFollower> follower);

 private:
  void tell_followers() noexcept;
  void give_copy_back() noexcept;

  std::shared_ptr<MemoryTier> tier_;  // destroyed after host_; nullptr: on NVMe
  Block host_;
  std::shared_ptr<HostBlocks> copies_;  // destroyed after copy_
  Block copy_;
  std::size_t bytes_;
  std::shared_ptr<MemoryTier> away_tier_;  // destroyed after away_; nullptr: not away
  Block away_;
  std::byte* data_;
  Mutex mutex_;
  std::vector<std::unique_ptr<PayloadFollower>> followers_ CASTOR_GUARDED_BY(mutex_);
};

using PayloadSet = std::array<std::shared_ptr<Payload>, kNumPayloadKinds>;

}  // namespace castor
