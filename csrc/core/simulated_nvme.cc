#include "core/simulated_nvme.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/simulator_check.h"

namespace castor {
namespace {

bool any(const std::vector<bool>& entries) {
  return std::find(entries.begin(), entries.end(), true) != entries.end();
}

void check(const StoredPayloads& stored, std::size_t num_chunks, double bytes_per_second) {
  for (const std::vector<bool>* entries : {&stored.states, &stored.weights}) {
    require_of_simulation(entries->empty() || entries->size() == num_chunks,
                          "there are " + std::to_string(num_chunks) + " chunks, and " +
                              std::to_string(entries->size()) + " are said to be stored or not");
  }
  require_of_simulation(bytes_per_second > 0.0 || (!any(stored.states) && !any(stored.weights)),
                        "payloads are stored on NVMe, and nvme_bytes_per_second is 0");
  require_of_simulation(
      stored.max_leases > 0 || !any(stored.weights),
      "parameters are stored on NVMe, and max_leases is 0: none could be fetched");
}

}  // namespace

SimulatedNvme::SimulatedNvme(const ChunkLayout& layout, std::span<const Placement> placements,
                             const OptimizerCost& optimizer, const StoredPayloads& stored,
                             double bytes_per_second)
    : layout_(layout),
      placements_(placements),
      optimizer_(optimizer),
      stored_(stored),
      params_(layout.chunks().size()),
      queue_(bytes_per_second) {
  check(stored, layout.chunks().size(), bytes_per_second);
}

std::uint64_t SimulatedNvme::stored_bytes(ChunkId chunk) const {
  const ChunkSpec& spec = layout_.chunk(chunk);
  const std::uint64_t state = state_bytes_of(spec, optimizer_);
  return (stores_states(chunk) ? state : 0) +
         (stores_weights(chunk) ? payload_bytes(spec, optimizer_) - state : 0);
}

double SimulatedNvme::read_ahead(ChunkId chunk, double now) {
  StoredParams& params = params_[index(chunk)];
  if (!params.in_memory) {
    params.in_memory = true;
    params.read = queue_.serve(now, weight_bytes(chunk));
  }
  return params.read;
}

double SimulatedNvme::begin_fetch(ChunkId chunk, double now) {
  if (!stores_weights(chunk)) {
    return 0.0;
  }
  const double read = read_ahead(chunk, now);
  params_[index(chunk)].in_memory = false;
  params_[index(chunk)].leased = true;
  ++num_leased_;
  return read;
}

void SimulatedNvme::end_fetch(ChunkId chunk) {
  if (std::exchange(params_[index(chunk)].leased, false)) {
    --num_leased_;
  }
}

bool SimulatedNvme::fetch_blocks(ChunkId chunk, CopyMode parameter_copies) const {
  return stores_weights(chunk) &&
         (parameter_copies == CopyMode::kSynchronous || num_leased_ >= stored_.max_leases);
}

std::vector<ChunkId> SimulatedNvme::announced(const Plan& plan, std::size_t first,
                                              const Residency& residency) const {
  return upcoming_chunks(
      upcoming_modules(plan, first), layout_, stored_.max_leases,
      [&](ChunkId chunk) { return stores_weights(chunk) && !residency.resident(chunk); });
}

void SimulatedNvme::write_gradients(ChunkId chunk, double now) {
  if (stores_weights(chunk)) {
    queue_.serve(now, weight_bytes(chunk));
  }
}

double SimulatedNvme::read_gradients(ChunkId chunk, double now) {
  return stores_weights(chunk) ? queue_.serve(now, weight_bytes(chunk)) : now;
}

// Reads and writes go on beside the updates before and after it.
double SimulatedNvme::update(ChunkId chunk, double now) {
  const double state = stores_states(chunk)
                           ? static_cast<double>(state_bytes_of(layout_.chunk(chunk), optimizer_))
                           : 0.0;
  // Parameters and gradients are read, parameters written.
  const double weights = stores_weights(chunk) ? 3.0 * weight_bytes(chunk) : 0.0;
  if (state + weights == 0.0) {
    return now;
  }
  return queue_.serve(now, 2.0 * state + weights);
}

}  // namespace castor
