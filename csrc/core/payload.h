#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "core/memory_tier.h"

namespace castor {

/// What a chunk owns besides its device slot.
enum class PayloadKind {
  kParam,
  kMaster,
  kGrad,
  kExpAvg,
  kExpAvgSq,
  kRemainder,     ///< low halves of masters whose upper halves are the parameters
  kMomentScales,  ///< of moments that are quantised in blocks
};

inline constexpr std::size_t kNumPayloadKinds = 7;

[[nodiscard]] constexpr std::string_view to_string(PayloadKind kind) noexcept {
  switch (kind) {
    case PayloadKind::kParam: return "parameters";
    case PayloadKind::kMaster: return "fp32 master weights";
    case PayloadKind::kGrad: return "gradients";
    case PayloadKind::kExpAvg: return "exp_avg";
    case PayloadKind::kExpAvgSq: return "exp_avg_sq";
    case PayloadKind::kRemainder: return "low halves of the master weights";
    case PayloadKind::kMomentScales: return "scales of the moments";
  }
  return "unknown";
}

/// One chunk payload at its home, with the tier that pays for it. Shared: tensors that users hold
/// (a state_dict, p.grad) keep the memory alive after the runtime is gone.
class Payload {
 public:
  Payload(std::shared_ptr<MemoryTier> tier, std::size_t bytes, const std::string& remedy)
      : tier_(std::move(tier)), block_(tier_->allocate(bytes, remedy)) {}

  [[nodiscard]] std::byte* data() const noexcept { return block_.data(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return block_.bytes(); }
  [[nodiscard]] TierKind tier() const noexcept { return tier_->ledger().tier(); }

 private:
  std::shared_ptr<MemoryTier> tier_;  // destroyed after block_
  Block block_;
};

using PayloadSet = std::array<std::shared_ptr<Payload>, kNumPayloadKinds>;

}  // namespace castor
