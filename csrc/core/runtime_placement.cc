#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/hybrid_placement.h"
#include "core/runtime.h"

// The part of Runtime that plans, and decides between steps which chunks live on the device.
namespace castor {

void Runtime::begin_next_step() noexcept {
  cursor_ = 0;
  others_peak_ = 0;
  diverged_ = false;
  pressed_ = false;
  demotions_at_step_start_ = manager_.counts().demotions;
}

PlanOptions Runtime::plan_options() const {
  const auto budget = static_cast<double>(manager_.device().ledger().budget());
  return {.device_budget_bytes = static_cast<std::size_t>(budget * options_.steady_cap_ratio),
          .fixed_device_bytes = fixed_device_bytes_,
          .max_prefetch = options_.max_prefetch,
          .policy = options_.policy};
}

std::vector<Placement> Runtime::placements() const {
  std::vector<Placement> placements(layout_.chunks().size());
  for (std::size_t i = 0; i < placements.size(); ++i) {
    placements[i] = manager_.placement(ChunkId{static_cast<std::uint32_t>(i)});
  }
  return placements;
}

void Runtime::plan_from(Trace trace) {
  PlanOptions options = plan_options();
  options.fixed_device_bytes += manager_.resident_bytes();
  plan_ = make_plan(trace, layout_, placements(), options);
  trace_ = std::move(trace);
  others_planned_ = std::max(others_planned_, others_peak_);
  ++counts_.plans;
}

bool Runtime::placement_due() const {
  const MutexLock lock(mutex_);
  return placement_trace_ && options_.policy == PlacementPolicy::kAuto &&
         options_.margin_ratio > 0.0;
}

void Runtime::place(const std::vector<bool>& candidates) {
  MutexLock lock(mutex_);
  await_operators(lock);
  if (!tracer_.empty() || !frames_.no_forward()) {
    throw UsageError("chunks are placed in the middle of a step; finish it first");
  }
  if (!placement_trace_) {
    return;
  }
  Trace trace = *std::exchange(placement_trace_, std::nullopt);
  placed_ = true;
  std::vector<Placement> streamed = placements();
  std::vector<std::size_t> bytes(streamed.size());
  std::vector<bool> leaves(streamed.size(), false);
  for (std::size_t i = 0; i < streamed.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    bytes[i] = manager_.on_device_bytes(chunk);
    if (manager_.promoted(chunk)) {
      streamed[i] = Placement::kStream;
      leaves[i] = true;
    }
  }
  PlanOptions plan = plan_options();
  plan.device_budget_bytes -= std::min(plan.device_budget_bytes, needed_by_others());
  const Promotions chosen =
      choose_promotions(trace, layout_, streamed, bytes, candidates,
                        {.plan = plan, .margin_ratio = options_.margin_ratio});
  for (const ChunkId chunk : chosen.chunks) {
    leaves[index(chunk)] = false;
  }
  all_to_host();  // slots that an evaluation left behind make room
  const TransferCounts before = manager_.counts();
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i]) {
      const ChunkId chunk{static_cast<std::uint32_t>(i)};
      manager_.demote(chunk);
      manager_.evict(chunk);
    }
  }
  others_give_way(chosen.bytes);
  for (const ChunkId chunk : chosen.chunks) {
    // What outlives the step (a loss that is kept) may take the room of the last ones, and a device
    // may refuse what its ledger has.
    try {
      if (!manager_.promoted(chunk) && !manager_.try_promote(chunk)) {
        break;
      }
    } catch (const OutOfMemory&) {
      break;
    }
  }
  if (manager_.counts().promotions != before.promotions ||
      manager_.counts().demotions != before.demotions) {
    plan_from(std::move(trace));
  }
  begin_next_step();
}

}  // namespace castor
