#include "store/storage_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "store/activation_pages.h"
#include "store/state_store.h"
#include "store/stored_weights.h"

namespace castor {
namespace {

constexpr WindowLimits kWindows{.fewest_for_weights = StoredWeights::kLeastSlots};

std::size_t bytes_of(const std::vector<PayloadSpec>& payloads) {
  std::size_t bytes = 0;
  for (const PayloadSpec& payload : payloads) {
    bytes += payload.bytes;
  }
  return bytes;
}

/// The order in which a session fills the host.
class HostFiller {
 public:
  HostFiller(const ChunkLayout& layout, std::span<const Placement> placements,
             const OptimizerStateOptions& options, std::size_t host_bytes, HostStoragePayer payer)
      : layout_(layout), options_(options), budget_(host_bytes) {
    std::vector<bool> on_host;
    for (std::size_t i = 0; i < placements.size(); ++i) {
      const ChunkSpec& chunk = layout.chunks()[i];
      on_host.push_back(placements[i] != Placement::kDevice);
      const bool own = payer == HostStoragePayer::kHostBudget ||
                       (payer == HostStoragePayer::kRankHostStorage && !chunk.updated_in_shards());
      const bool weights = own || payer == HostStoragePayer::kShardedGradients;
      const std::size_t payloads = (weights ? 1 : 0) + (own && chunk.trainable ? 1 : 0);
      needs_.weights.push_back(on_host[i] ? payloads * chunk.used_bytes : 0);
      std::vector<PayloadSpec>& states = states_.emplace_back();
      if (on_host[i]) {
        states = state_payloads(chunk, options.rule.get(), layout.world_size());
      }
      for (PayloadSpec& payload : states) {
        payload.name += " of chunk " + std::to_string(i);
      }
      needs_.states.push_back(bytes_of(states));
    }
    needs_.weights_slot =
        NvmeContent{.chunks = StoredWeights::parts_of(layout, on_host)}.window_bytes(1);
    needs_.states_slot = NvmeContent{.chunks = states_}.window_bytes(1);
  }

  StoragePlan run() {
    const std::size_t count = states_.size();
    places_.stored = {.states = std::vector<bool>(count, false),
                      .weights = std::vector<bool>(count, false)};
    places_.nvme = {{.name = "parameters and gradients"},
                    {.name = "optimizer states"},
                    {.name = "activations"}};
    if (options_.nvme) {
      open_activations();
      store_weights();
    }
    for (std::size_t i = 0; i < count; ++i) {
      places_.host_bytes += places_.stored.weights[i] ? 0 : needs_.weights[i];
    }
    if (options_.nvme) {
      store_states();
    }
    for (std::size_t i = 0; i < count; ++i) {
      places_.host_bytes += places_.stored.states[i] ? 0 : needs_.states[i];
    }
    fill_with_activations();
    return std::move(places_);
  }

 private:
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

  // The window, before anything else takes its room.
  void open_activations() {
    if (options_.nvme->holds_activations) {
      NvmeContent& activations = places_.nvme[StoragePlan::kActivations];
      activations.chunks = {{page(0)}};
      take_window(activations, ActivationPages::kLeastSlots, ActivationPages::kSlots);
    }
  }

  // With as many pages as the rest has left of the budget. Without any, there is no window either.
  void fill_with_activations() {
    NvmeContent& activations = places_.nvme[StoragePlan::kActivations];
    if (activations.num_slots == 0) {
      return;
    }
    const std::size_t window = activations.window_bytes();
    activations.chunks.clear();
    const std::uint64_t budget = options_.nvme->budget_bytes;
    const std::uint64_t left = budget - std::min(budget, places_.nvme_bytes());
    for (std::size_t i = 0; i < left / ActivationPages::kPageBytes; ++i) {
      activations.chunks.push_back({page(i)});
    }
    if (activations.chunks.empty()) {
      activations.num_slots = 0;
      places_.host_bytes -= window;
    }
  }

  static PayloadSpec page(std::size_t i) {
    return {.name = "page " + std::to_string(i) + " of activations",
            .bytes = ActivationPages::kPageBytes};
  }

  void store_weights() {
    StoredWeightsChoice choice = choose_stored_weights(needs_, room(), kWindows);
    if (choice.window_slots == 0) {
      return;
    }
    NvmeContent& weights = places_.nvme[StoragePlan::kWeights];
    weights.chunks = StoredWeights::parts_of(layout_, choice.stored);
    take_window(weights, kWindows.fewest_for_weights, choice.window_slots);
    places_.stored.weights = std::move(choice.stored);
    places_.stored.max_leases = StoredWeights::max_leases_in(weights.num_slots);
  }

  // The window comes out of the host's room before the states that stay there.
  void store_states() {
    NvmeContent& states = places_.nvme[StoragePlan::kStates];
    states.chunks = std::move(states_);
    places_.stored.states =
        choose_stored(needs_.states, room(), states.window_bytes(kWindows.most_for_states),
                      options_.nvme_fraction);
    for (std::size_t i = 0; i < states.chunks.size(); ++i) {
      if (!places_.stored.states[i]) {
        states.chunks[i].clear();
      }
    }
    take_window(states, /*fewest=*/1, kWindows.most_for_states);
  }

  const ChunkLayout& layout_;
  const OptimizerStateOptions& options_;
  const std::size_t budget_;
  HostNeeds needs_;
  std::vector<std::vector<PayloadSpec>> states_;  // per chunk, of those on the host
  StoragePlan places_;
};

}  // namespace

std::uint64_t StoragePlan::nvme_bytes() const {
  std::uint64_t bytes = 0;
  for (const NvmeContent& content : nvme) {
    bytes += content.stored_bytes();
  }
  return bytes;
}

StoragePlan plan_storage(const ChunkLayout& layout, std::span<const Placement> placements,
                         const OptimizerStateOptions& states, std::size_t host_bytes,
                         HostStoragePayer payer) {
  return HostFiller(layout, placements, states, host_bytes, payer).run();
}

}  // namespace castor
