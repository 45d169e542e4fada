#include "core/placement.h"

#include <algorithm>
#include <numeric>
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

std::vector<bool> choose_stored(std::span<const std::size_t> state_bytes, std::size_t host_bytes,
                                std::size_t window_bytes, double fraction) {
  const std::size_t total = std::accumulate(state_bytes.begin(), state_bytes.end(), std::size_t{0});
  const auto wanted = static_cast<std::size_t>((1.0 - fraction) * static_cast<double>(total));
  std::vector<bool> stored(state_bytes.size(), false);
  if (wanted == total && total <= host_bytes) {
    return stored;
  }
  const std::size_t room = std::min(wanted, host_bytes - std::min(host_bytes, window_bytes));
  const double host_share = static_cast<double>(room) / static_cast<double>(total);
  // What the host may hold of the chunks so far, and does not.
  double credit = 0.0;
  std::size_t on_host = 0;
  for (std::size_t i = 0; i < state_bytes.size(); ++i) {
    const auto bytes = static_cast<double>(state_bytes[i]);
    credit += host_share * bytes;
    // Rounding of the credit must not pass the budget.
    stored[i] = state_bytes[i] > 0 && (credit < bytes || on_host + state_bytes[i] > room);
    if (!stored[i]) {
      credit -= bytes;
      on_host += state_bytes[i];
    }
  }
  return stored;
}

StoredWeightsChoice choose_stored_weights(const HostNeeds& needs, std::size_t host_bytes,
                                          const WindowLimits& limits) {
  const auto sum = [](const std::vector<std::size_t>& bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
  };
  const auto left = [](std::size_t bytes, std::size_t taken) {
    return bytes - std::min(bytes, taken);
  };
  const std::size_t weights = sum(needs.weights);
  const std::size_t states = sum(needs.states);
  const auto states_window = [&](std::size_t slots) {
    return std::min(states, slots * needs.states_slot);
  };
  StoredWeightsChoice choice{.stored = std::vector<bool>(needs.weights.size(), false)};
  if (weights == 0 || weights + states_window(1) <= host_bytes) {
    return choice;
  }
  // Where the host is that short, the states' window makes do with one slot.
  std::size_t room = left(host_bytes, states_window(limits.most_for_states));
  if (room < limits.fewest_for_weights * needs.weights_slot) {
    room = left(host_bytes, states_window(1));
  }
  choice.window_slots =
      std::clamp(room / needs.weights_slot, limits.fewest_for_weights, limits.most_for_weights);
  choice.stored = choose_stored(needs.weights, room, choice.window_slots * needs.weights_slot);
  return choice;
}

}  // namespace castor
