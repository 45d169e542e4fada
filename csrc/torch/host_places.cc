#include "torch/host_places.h"

#include <algorithm>
#include <string>
#include <utility>

#include "torch/state_places.h"
#include "torch/stored_weights.h"

namespace castor {
namespace {

constexpr WindowLimits kWindows{.fewest_for_weights = StoredWeights::kLeastSlots};

/// The order in which a session fills the host.
class HostFiller {
 public:
  HostFiller(const ChunkLayout& layout, std::span<const Placement> placements,
             const OptimizerStateOptions& options, std::size_t host_bytes, HomesPaid homes)
      : layout_(layout), options_(options), budget_(host_bytes), homes_(homes) {
    for (std::size_t i = 0; i < placements.size(); ++i) {
      on_host_.push_back(placements[i] != Placement::kDevice);
      states_.push_back(states_of(i));
    }
  }

  HostPlaces run() {
    const std::size_t count = on_host_.size();
    places_.stored = {.states = std::vector<bool>(count, false),
                      .weights = std::vector<bool>(count, false)};
    places_.nvme = {{.name = "parameters and gradients"}, {.name = "optimizer states"}};
    if (options_.nvme) {
      store_weights();
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (homes_ == HomesPaid::kByTheHost && !places_.stored.weights[i]) {
        places_.host_bytes += payload_bytes(i, 1);
      }
    }
    if (options_.nvme) {
      store_states();
    }
    for (std::size_t i = 0; i < count; ++i) {
      places_.host_bytes += places_.stored.states[i] ? 0 : bytes_of(states_[i]);
    }
    return std::move(places_);
  }

 private:
  using Payloads = std::vector<PayloadSpec>;

  static std::size_t bytes_of(const Payloads& payloads) {
    std::size_t bytes = 0;
    for (const PayloadSpec& payload : payloads) {
      bytes += payload.bytes;
    }
    return bytes;
  }

  [[nodiscard]] Payloads states_of(std::size_t chunk) const {
    if (!on_host_[chunk]) {
      return {};
    }
    Payloads payloads =
        state_payloads(layout_.chunks()[chunk], options_.rule.get(), layout_.world_size());
    for (PayloadSpec& payload : payloads) {
      payload.name += " of chunk " + std::to_string(chunk);
    }
    return payloads;
  }

  /// Of a chunk's parameters, `copies` times, and gradients.
  [[nodiscard]] std::size_t payload_bytes(std::size_t i, std::size_t copies) const {
    const ChunkSpec& chunk = layout_.chunks()[i];
    return on_host_[i] ? (copies + (chunk.trainable ? 1 : 0)) * chunk.used_bytes : 0;
  }

  [[nodiscard]] std::size_t room() const {
    return budget_ - std::min<std::size_t>(budget_, places_.host_bytes);
  }

  /// Of so many slots the most that there is room for, or `fewest`.
  void take_window(NvmeContent& content, std::size_t fewest, std::size_t most) {
    content.num_slots = most;
    while (content.num_slots > fewest && content.window_bytes() > room()) {
      --content.num_slots;
    }
    places_.host_bytes += content.window_bytes();
  }

  [[nodiscard]] HostNeeds needs() const {
    HostNeeds needs;
    for (std::size_t i = 0; i < on_host_.size(); ++i) {
      needs.weights.push_back(payload_bytes(i, homes_ == HomesPaid::kByRanks ? 0 : 1));
      needs.states.push_back(bytes_of(states_[i]));
    }
    needs.weights_slot = all_weights().window_bytes(1);
    needs.states_slot = NvmeContent{.chunks = states_}.window_bytes(1);
    return needs;
  }

  [[nodiscard]] NvmeContent all_weights() const {
    return {.chunks = StoredWeights::parts_of(layout_, on_host_)};
  }

  void store_weights() {
    StoredWeightsChoice choice = choose_stored_weights(needs(), budget_, kWindows);
    if (choice.window_slots == 0) {
      return;
    }
    NvmeContent& weights = places_.nvme[HostPlaces::kWeights];
    weights.chunks = StoredWeights::parts_of(layout_, choice.stored);
    take_window(weights, kWindows.fewest_for_weights, choice.window_slots);
    places_.stored.weights = std::move(choice.stored);
    places_.stored.max_held = StoredWeights::max_held_in(weights.num_slots);
  }

  // The window comes out of the host's room before the states that stay there.
  void store_states() {
    NvmeContent& states = places_.nvme[HostPlaces::kStates];
    states.chunks = states_;
    std::vector<std::size_t> bytes;
    for (const Payloads& payloads : states_) {
      bytes.push_back(bytes_of(payloads));
    }
    places_.stored.states = choose_stored(
        bytes, room(), states.window_bytes(kWindows.most_for_states), options_.nvme_fraction);
    for (std::size_t i = 0; i < states_.size(); ++i) {
      if (!places_.stored.states[i]) {
        states.chunks[i].clear();
      }
    }
    take_window(states, /*fewest=*/1, kWindows.most_for_states);
  }

  const ChunkLayout& layout_;
  const OptimizerStateOptions& options_;
  const std::size_t budget_;
  const HomesPaid homes_;
  std::vector<bool> on_host_;     // per chunk
  std::vector<Payloads> states_;  // per chunk, of those on the host
  HostPlaces places_;
};

}  // namespace

std::uint64_t HostPlaces::nvme_bytes() const {
  std::uint64_t bytes = 0;
  for (const NvmeContent& content : nvme) {
    bytes += content.stored_bytes();
  }
  return bytes;
}

HostPlaces choose_host_places(const ChunkLayout& layout, std::span<const Placement> placements,
                              const OptimizerStateOptions& states, std::size_t host_bytes,
                              HomesPaid homes) {
  return HostFiller(layout, placements, states, host_bytes, homes).run();
}

}  // namespace castor
