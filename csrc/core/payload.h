#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/memory_tier.h"
#include "core/mutex.h"

namespace castor {

/// What a chunk owns besides its device slot: parameters, gradients, and what the optimizer keeps
/// of them, by number (state_payload). What a number means is the optimizer's affair.
enum class PayloadKind : std::uint8_t { kParam, kGrad, kFirstState };

inline constexpr std::size_t kMaxStatePayloads = 6;
inline constexpr std::size_t kNumPayloadKinds = 2 + kMaxStatePayloads;

/// Requires number < kMaxStatePayloads.
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

/// Refers to a payload's memory and keeps up with it. Seam: torch storages in csrc/torch.
class PayloadFollower {
 public:
  virtual ~PayloadFollower() = default;
  /// False for good once nothing is left to keep up.
  [[nodiscard]] virtual bool alive() const noexcept = 0;
  /// The payload's bytes are at `address` now.
  virtual void moved(std::byte* address) noexcept = 0;
};

/// One chunk payload at its home, with the tier that pays for it. Shared: tensors that users hold
/// (a state_dict, p.grad) keep the memory alive after the runtime is gone.
///
/// A payload may be away from its home, in memory of another tier; the home stays allocated, so
/// that the way back cannot fail for want of memory, but its contents are discarded. Who moves it
/// copies the bytes and sees to it that nobody uses them meanwhile; followers may be added from any
/// thread.
class Payload {
 public:
  Payload(std::shared_ptr<MemoryTier> tier, std::size_t bytes, const std::string& remedy)
      : tier_(std::move(tier)),
        home_(tier_->allocate(bytes, remedy)),
        bytes_(home_.bytes()),
        data_(home_.data()) {}
  /// One in no memory (on NVMe, in parts on several ranks): a HomeStore has the bytes.
  explicit Payload(std::size_t bytes) noexcept : bytes_(bytes), data_(nullptr) {}

  /// Where the bytes are; nullptr for one in no memory.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// The tier that the bytes are in.
  [[nodiscard]] TierKind tier() const noexcept {
    return tier_ == nullptr ? TierKind::kNvme : (away_tier_ ? away_tier_ : tier_)->ledger().tier();
  }

  [[nodiscard]] bool away() const noexcept { return away_tier_ != nullptr; }
  [[nodiscard]] std::byte* home() const noexcept { return home_.data(); }
  /// What the payload is on the device, while it is away: as Block::await_users.
  void await_users() const { away_.await_users(); }
  /// As Block::add_user, where the bytes are.
  void add_user(StreamId stream) const { (away() ? away_ : home_).add_user(stream); }
  /// The bytes are in `block` of `tier` now, which has room for them. Requires !away().
  void move_to(std::shared_ptr<MemoryTier> tier, Block block) noexcept;
  /// The bytes are at home now; returns where they were. Requires away().
  Block move_home() noexcept;
  /// For one that outlives its session: a forked process may use it too, where it is at home.
  void share_with_children() noexcept { home_.share_with_children(); }
  /// From now on it is told of moves, until it is not alive any more.
  void add_follower(std::unique_ptr<PayloadFollower> follower);

 private:
  void tell_followers() noexcept;

  std::shared_ptr<MemoryTier> tier_;  // destroyed after home_; nullptr: on NVMe
  Block home_;
  std::size_t bytes_;
  std::shared_ptr<MemoryTier> away_tier_;  // destroyed after away_; nullptr: at home
  Block away_;
  std::byte* data_;
  Mutex mutex_;
  std::vector<std::unique_ptr<PayloadFollower>> followers_ CASTOR_GUARDED_BY(mutex_);
};

using PayloadSet = std::array<std::shared_ptr<Payload>, kNumPayloadKinds>;

}  // namespace castor
