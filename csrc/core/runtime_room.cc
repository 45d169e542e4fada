#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/runtime.h"
#include "core/units.h"

// The part of Runtime that makes room on the device, and says what would do where there is none.
namespace castor {
namespace {

/// Names the calling thread.
const void* this_thread() noexcept {
  thread_local const char name = 0;
  return &name;
}

}  // namespace

void Runtime::used_by_this_thread() {
  thread_ = this_thread();
  group_->used(this);
}

// Where operators do not hold what they use (docs/design/0021), those of another thread may be
// using a chunk that no module pins.
bool Runtime::yields() const {
  return options_.freed_slots == FreedSlots::kReusedAtOnce || thread_ == this_thread();
}

bool Runtime::make_room(std::size_t bytes, std::size_t cap_bytes, std::uint64_t horizon) {
  others_give_way(bytes);
  return manager_.make_room(bytes, cap_bytes, horizon);
}

void Runtime::others_give_way(std::size_t bytes) {
  for_each_other([bytes](Runtime& other) CASTOR_NOT_ANALYZED { other.give_way(bytes); });
}

// For another model. It is no pressure of this one's: its plan holds when it goes on.
void Runtime::give_way(std::size_t bytes) {
  const Ledger& device = manager_.device().ledger();
  static_cast<void>(spare_gives_way(bytes));
  if (device.available() >= bytes || manager_.slot_bytes() == 0 || !yields()) {
    return;
  }
  const CauseScope cause(timeline_, TransferCause::kPressure);
  static_cast<void>(manager_.make_room(bytes, kNoCap));
}

// Returns whether anything came free.
bool Runtime::spare_gives_way(std::size_t bytes) {
  const std::size_t available = manager_.device().ledger().available();
  return spare_ != nullptr && available < bytes && spare_->give_up(bytes - available);
}

bool Runtime::demote_one() {
  bool any = false;
  for_each_other([&any](Runtime& other) CASTOR_NOT_ANALYZED {
    const CauseScope cause(other.timeline_, TransferCause::kPressure);
    any = any || (other.yields() && other.manager_.demote_one());
  });
  return any || manager_.demote_one();
}

// A backward that is over keeps its last module's chunks until the step. Its device copies are
// clean, or written back, so one that is not over runs on from host storage (docs/design/0002).
void Runtime::others_end_backward() {
  for_each_other([](Runtime& other) CASTOR_NOT_ANALYZED {
    if (other.options_.freed_slots == FreedSlots::kKeepTheirBytes && other.yields()) {
      other.frames_.end_backward();
    }
  });
}

std::size_t Runtime::kept_by_others() const {
  std::size_t bytes = 0;
  for_each_other([&](const Runtime& other) CASTOR_NOT_ANALYZED {
    bytes +=
        other.fixed_device_bytes_ + other.manager_.resident_bytes() +
        (other.yields() ? other.manager_.residency().held_bytes() : other.manager_.slot_bytes()) +
        (other.nonmodel_ == nonmodel_ ? 0 : other.nonmodel_->bytes());
  });
  return bytes;
}

// By any one of them, for its largest module: one is active at a time.
std::size_t Runtime::needed_by_others() const {
  std::size_t bytes = 0;
  for_each_other([&](const Runtime& other) CASTOR_NOT_ANALYZED {
    const std::size_t activations =
        other.nonmodel_ == nonmodel_ ? 0 : other.nonmodel_->peak_bytes();
    bytes = std::max(bytes, other.layout_.largest_working_set_bytes() + activations);
  });
  return bytes;
}

std::uint64_t Runtime::departures() const {
  std::uint64_t count = manager_.counts().evictions + manager_.counts().demotions;
  for_each_other([&count](const Runtime& other) CASTOR_NOT_ANALYZED {
    count += other.manager_.counts().evictions + other.manager_.counts().demotions;
  });
  return count;
}

void Runtime::make_way(RuntimeGroup& group) CASTOR_NOT_ANALYZED {
  const MutexLock lock(group.mutex());
  for (Runtime* const runtime : group.members()) {
    while (runtime->yields() && runtime->manager_.demote_one()) {
    }
    runtime->give_way(~std::size_t{0});
  }
}

std::size_t Runtime::bytes_of_others() const {
  const MutexLock lock(mutex_);
  return kept_by_others();
}

void Runtime::bring_in(ChunkId chunk, EventKind kind, ModuleId module) {
  const CauseScope cause(timeline_, TransferCause::kDemand);
  const std::size_t bytes = layout_.chunk(chunk).capacity_bytes;
  bool others_left = false;
  if (!layout_.chunk(chunk).by_row) {  // else chunks that are read by the row leave first
    static_cast<void>(spare_gives_way(bytes));
  }
  // Another thread's allocation may take what was made for this chunk: try until there is nothing
  // to give.
  do {
    while (!make_room(bytes, slot_cap())) {
      if (!spare_gives_way(bytes) && !demote_one()) {
        if (std::exchange(others_left, true)) {
          throw_out_of_memory(bytes, place_of(kind, module));
        }
        others_end_backward();
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
  const std::uint64_t before = departures();
  const std::size_t wanted = manager_.device().ledger().available() + bytes;
  bool fits = make_room(wanted, kNoCap);
  while (!fits && demote_one()) {
    fits = make_room(wanted, kNoCap);
  }
  return departures() != before;
}

void Runtime::reclaim(std::size_t bytes) {
  const MutexLock lock(mutex_);
  // Of the models whose account it is, the one under way: its place is what an error names.
  Runtime* under_way = this;
  for_each_other([&](Runtime& other) CASTOR_NOT_ANALYZED {
    under_way = other.nonmodel_ == nonmodel_ ? &other : under_way;
  });
  under_way = group_->members().back() == this ? this : under_way;
  [&]() CASTOR_NOT_ANALYZED { under_way->reclaim_here(bytes); }();
}

void Runtime::reclaim_here(std::size_t bytes) {
  const CauseScope cause(timeline_, TransferCause::kPressure);
  static_cast<void>(spare_gives_way(bytes));
  press_inference(bytes);
  const std::uint64_t before = manager_.counts().evictions;
  bool fits = make_room(bytes, kNoCap);
  const std::string where = fits ? std::string() : place_under_way();
  // What was promoted into spare memory gives it back: no allocation fails that would not have
  // failed without promotions.
  while (!fits && demote_one()) {
    fits = make_room(bytes, kNoCap);
  }
  if (!fits) {
    others_end_backward();
    fits = make_room(bytes, kNoCap);
  }
  if (!fits && frames_.backward_pins() && options_.freed_slots == FreedSlots::kKeepTheirBytes) {
    // Backward may run on from host storage: slower, but it runs. An operator that took the
    // slot's address before this allocation still reads the right bytes: freed slots keep them
    // until the next fetch (SlotArena), and no fetch happens inside an operator.
    frames_.end_backward();
    fits = make_room(bytes, kNoCap);
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
  std::size_t smallest = fixed_device_bytes_ + in_use + activations + bytes + kept_by_others();
  if (plan_) {  // not its own prediction: it may have been made with more chunks promoted
    const Plan streamed = make_plan(*trace_, layout_, placements(), plan_options());
    smallest = std::max(smallest, streamed.prediction().smallest_budget_bytes);
  }
  // castor.OutOfMemoryError.advise puts another advice in place of the one from "; the smallest"
  // on.
  throw ledger.out_of_memory(
      bytes, where + ": chunks in use take " + format_bytes(in_use) +
                 " and activations and temporaries " + format_bytes(activations) +
                 "; the smallest budget that gets past this point is " + format_bytes(smallest) +
                 (mode_ == PassMode::kInference
                      ? ": raise device_memory to that or more, or make the batch smaller"
                      : ": raise device_memory to that or more, make the batch smaller, recompute "
                        "activations (activations='auto'), or run MLPs of long sequences in tiles "
                        "too (activations='recompute+tile:4')"));
}

}  // namespace castor
