#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/runtime.h"
#include "core/units.h"

// The part of Runtime that makes room on the device, and says what would do where there is none.
namespace castor {

void Runtime::bring_in(ChunkId chunk, EventKind kind, ModuleId module) {
  const CauseScope cause(timeline_, TransferCause::kDemand);
  const std::size_t bytes = layout_.chunk(chunk).capacity_bytes;
  // Another thread's allocation may take what was made for this chunk: try until there is nothing
  // to give.
  do {
    while (!manager_.make_room(bytes, slot_cap())) {
      if (!manager_.demote_one()) {
        throw_out_of_memory(bytes, place_of(kind, module));
      }
    }
  } while (!try_fetch(chunk));
  prefetched_[index(chunk)] = false;
  ++counts_.demand_fetches;
}

// What the ledger has, the device may refuse: for fragmentation, or another process. Then more
// leaves.
bool Runtime::try_fetch(ChunkId chunk) {
  try {
    return manager_.try_fetch(chunk);
  } catch (const OutOfMemory& error) {  // of the host: its window on NVMe is full
    if (error.tier() != TierKind::kDevice || !evict_more(layout_.chunk(chunk).capacity_bytes)) {
      throw;
    }
    return false;
  }
}

bool Runtime::evict_more(std::size_t bytes) {
  const TransferCounts before = manager_.counts();
  const std::size_t wanted = manager_.device().ledger().available() + bytes;
  bool fits = manager_.make_room(wanted, kNoCap);
  while (!fits && manager_.demote_one()) {
    fits = manager_.make_room(wanted, kNoCap);
  }
  return manager_.counts().evictions != before.evictions ||
         manager_.counts().demotions != before.demotions;
}

void Runtime::reclaim(std::size_t bytes) {
  const MutexLock lock(mutex_);
  const CauseScope cause(timeline_, TransferCause::kPressure);
  press_inference(bytes);
  const std::uint64_t before = manager_.counts().evictions;
  bool fits = manager_.make_room(bytes, kNoCap);
  const std::string where = fits ? std::string() : place_under_way();
  // What was promoted into spare memory gives it back: no allocation fails that would not have
  // failed without promotions.
  while (!fits && manager_.demote_one()) {
    fits = manager_.make_room(bytes, kNoCap);
  }
  if (!fits && frames_.backward_pins() && options_.freed_slots == FreedSlots::kKeepTheirBytes) {
    // Backward may run on from the home copies: slower, but it runs. An operator that took the
    // slot's address before this allocation still reads the right bytes: freed slots keep them
    // until the next fetch (SlotArena), and no fetch happens inside an operator.
    frames_.end_backward();
    fits = manager_.make_room(bytes, kNoCap);
  }
  note_pressure(manager_.counts().evictions - before);
  if (!fits) {
    throw_out_of_memory(bytes, where);
  }
}

bool Runtime::evict_refused(std::size_t bytes) {
  const MutexLock lock(mutex_);
  const CauseScope cause(timeline_, TransferCause::kPressure);
  press_inference(bytes);
  const std::uint64_t before = manager_.counts().evictions;
  const bool any = evict_more(bytes);
  note_pressure(manager_.counts().evictions - before);
  return any;
}

// What presses before a step, or in inference within it, is nothing that its plan could foresee.
void Runtime::note_pressure(std::uint64_t evictions) {
  counts_.pressure_evictions += evictions;
  const bool of_step = !tracer_.empty() && (mode_ == PassMode::kTraining || frames_.no_forward());
  pressed_ = pressed_ || (of_step && evictions > 0);
}

std::string Runtime::place_of(EventKind kind, ModuleId module) const {
  return std::string("in the ") + (kind == EventKind::kBackwardEnter ? "backward" : "forward") +
         " of module '" + layout_.module(module).name + "'";
}

std::string Runtime::place_under_way() const {
  if (const auto module = frames_.innermost()) {
    return place_of(EventKind::kForwardEnter, *module);
  }
  if (const auto module = frames_.backward()) {
    return place_of(EventKind::kBackwardEnter, *module);
  }
  return "outside any module";
}

// All that may leave has left: what the slots still take is in use.
void Runtime::throw_out_of_memory(std::size_t bytes, const std::string& where) const {
  const Ledger& ledger = manager_.device().ledger();
  const std::size_t in_use = manager_.slot_bytes();
  const std::size_t activations = nonmodel_->bytes();
  std::size_t smallest = fixed_device_bytes_ + in_use + activations + bytes;
  if (plan_) {  // not its own prediction: it may have been made with more chunks promoted
    const Plan streamed = make_plan(*trace_, layout_, placements(), plan_options());
    smallest = std::max(smallest, streamed.prediction().smallest_budget_bytes);
  }
  throw OutOfMemory(TierKind::kDevice, bytes, ledger.available(), ledger.budget(),
                    where + ": chunks in use take " + format_bytes(in_use) +
                        " and activations and temporaries " + format_bytes(activations) +
                        "; the smallest budget that gets past this point is " +
                        format_bytes(smallest) +
                        ": raise device_memory to that or more, make the batch smaller, recompute "
                        "activations (activations='auto'), or run MLPs of long sequences in tiles "
                        "too (activations='recompute+tile:4')");
}

}  // namespace castor
