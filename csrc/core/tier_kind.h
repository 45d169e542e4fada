#pragma once

#include <string_view>

namespace castor {

/// Tier of memory. On a machine without a GPU the device is a budgeted arena in host memory.
enum class TierKind { kDevice, kHost, kNvme };

[[nodiscard]] constexpr std::string_view to_string(TierKind tier) noexcept {
  switch (tier) {
    case TierKind::kDevice: return "device";
    case TierKind::kHost: return "host";
    case TierKind::kNvme: return "nvme";
  }
  return "unknown";
}

}  // namespace castor
