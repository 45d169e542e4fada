#include "python/host_places.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "io/nvme_tier.h"
#include "torch/stored_weights.h"

namespace castor {
namespace {

using Chunks = std::vector<std::vector<PayloadSpec>>;

/// The order in which a session fills the host.
class HostFiller {
 public:
  HostFiller(const ChunkLayout& layout, std::span<const Placement> placements,
             const OptimizerStateOptions& states, std::size_t host_bytes)
      : layout_(layout), placements_(placements), states_(states), budget_(host_bytes) {}

  HostPlaces run() {
    const std::size_t count = placements_.size();
    places_.stored = {.states = std::vector<bool>(count, false),
                      .weights = std::vector<bool>(count, false)};
    if (states_.nvme) {
      store_weights();
    }
    for (std::size_t i = 0; i < count; ++i) {
      const ChunkSpec& chunk = layout_.chunks()[i];
      if (on_host(i) && !places_.stored.weights[i]) {
        places_.host_bytes += (chunk.trainable ? 2 : 1) * chunk.used_bytes;
      }
    }
    keep_states();
    return std::move(places_);
  }

 private:
  [[nodiscard]] bool on_host(std::size_t chunk) const {
    return placements_[chunk] != Placement::kDevice;
  }
  [[nodiscard]] std::size_t room() const {
    return budget_ - std::min<std::size_t>(budget_, places_.host_bytes);
  }

  /// Takes a window as NvmeTier does; returns its slots.
  std::size_t take_window(const Chunks& chunks, WindowSlots slots) {
    const std::size_t count = NvmeTier::slots_within(chunks, slots, room());
    places_.host_bytes += NvmeTier::window_bytes(chunks, count);
    places_.nvme_bytes += NvmeTier::stored_bytes(chunks);
    return count;
  }

  void store_weights() {
    StoredWeightsChoice choice =
        choose_stored_weights(StoredWeights::needs_of(layout_, placements_, states_), budget_,
                              {.fewest_for_weights = StoredWeights::kLeastSlots});
    if (choice.window_slots == 0) {
      return;
    }
    Chunks parts;
    for (std::size_t i = 0; i < choice.stored.size(); ++i) {
      const ChunkSpec& chunk = layout_.chunks()[i];
      const std::size_t num_parts = choice.stored[i] ? (chunk.trainable ? 2 : 1) : 0;
      for (std::size_t part = 0; part < num_parts; ++part) {
        parts.push_back({{"", chunk.used_bytes}});
      }
    }
    const std::size_t slots =
        take_window(parts, {.least = StoredWeights::kLeastSlots, .most = choice.window_slots});
    places_.stored.weights = std::move(choice.stored);
    places_.stored.max_held = StoredWeights::max_held_in(slots);
    places_.nvme_weight_bytes = places_.nvme_bytes;
  }

  void keep_states() {
    Chunks payloads(placements_.size());
    std::vector<std::size_t> bytes(placements_.size(), 0);
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      if (on_host(i)) {
        for (const std::size_t payload :
             state_payload_bytes(layout_.chunks()[i], states_.rule.get(), layout_.world_size())) {
          payloads[i].push_back({"", payload});
          bytes[i] += payload;
        }
      }
    }
    if (states_.nvme) {
      places_.stored.states =
          choose_stored(bytes, room(), NvmeTier::window_bytes(payloads, WindowSlots{}.most),
                        states_.nvme_fraction);
    }
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      if (!places_.stored.states[i]) {
        payloads[i].clear();
      }
    }
    if (NvmeTier::stored_bytes(payloads) > 0) {
      take_window(payloads, {});
    }
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      places_.host_bytes += places_.stored.states[i] ? 0 : bytes[i];
    }
  }

  const ChunkLayout& layout_;
  const std::span<const Placement> placements_;
  const OptimizerStateOptions& states_;
  const std::size_t budget_;
  HostPlaces places_;
};

}  // namespace

HostPlaces choose_host_places(const ChunkLayout& layout, std::span<const Placement> placements,
                              const OptimizerStateOptions& states, std::size_t host_bytes) {
  return HostFiller(layout, placements, states, host_bytes).run();
}

}  // namespace castor
