#include "core/placement.h"

#include <string>

#include "core/error.h"

namespace castor {
namespace {

void check_fraction(const char* name, double value) {
  if (!(value >= 0.0 && value <= 1.0)) {
    throw InvalidArgument(std::string(name) + " is " + std::to_string(value) +
                          "; it must lie in [0, 1]");
  }
}

}  // namespace

std::vector<Placement> place_chunks(const ChunkLayout& layout, const PlacementOptions& options) {
  check_fraction("offload_optim_frac", options.offload_optim_frac);
  check_fraction("offload_param_frac", options.offload_param_frac);
  if (options.offload_param_frac > 0.0 && options.offload_optim_frac < 1.0) {
    throw InvalidArgument(
        "offload_param_frac is above 0 while offload_optim_frac is below 1: parameters can leave "
        "the "
        "device only after their optimizer state has; set offload_optim_frac=1.0");
  }
  const std::size_t count = layout.chunks().size();
  switch (options.policy) {
    case PlacementPolicy::kAuto:
    case PlacementPolicy::kCpu: return std::vector<Placement>(count, Placement::kStream);
    case PlacementPolicy::kCuda: return std::vector<Placement>(count, Placement::kDevice);
    case PlacementPolicy::kStatic: break;
  }
  std::vector<Placement> placements(count, Placement::kDevice);
  const auto total = static_cast<double>(layout.used_bytes());
  double seen = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    // A chunk leaves when its first byte lies in the offloaded fraction.
    if (seen < options.offload_param_frac * total) {
      placements[i] = Placement::kStream;
    } else if (seen < options.offload_optim_frac * total) {
      placements[i] = Placement::kKeep;
    }
    seen += static_cast<double>(layout.chunks()[i].used_bytes);
  }
  return placements;
}

}  // namespace castor
