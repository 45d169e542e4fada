#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/runtime.h"

// The part of Runtime that tells passes without a backward from steps, and runs their plan.
namespace castor {

void Runtime::begin_pass(ModuleId module, PassMode mode) {
  if (mode == PassMode::kTraining) {
    change_mode(mode);
    return;
  }
  const std::size_t peak = inference_peaks_.take(nonmodel_->bytes());
  const bool goes_on = mode_ == PassMode::kInference;
  if (goes_on) {  // else it was a step's
    inference_.note_nonmodel(peak);
  }
  const bool followed = inference_.followed();
  mode_ = mode;
  const bool round_begins = inference_.begin_pass(module);
  const bool chose = round_begins && make_inference_room(nonmodel_->bytes());
  if (chose || !goes_on || followed != inference_.followed()) {
    rank_anew();
  }
}

void Runtime::end_pass() {
  if (mode_ == PassMode::kInference) {
    inference_.note_nonmodel(inference_peaks_.take(nonmodel_->bytes()));
  }
}

void Runtime::change_mode(PassMode mode) {
  if (mode_ != mode) {
    forget_round_ahead();
    mode_ = mode;
    rank_anew();
  }
}

// No next round is looked forward to: what was read for it makes room for what comes instead.
void Runtime::forget_round_ahead() {
  inference_.look_again();
  if (ParamStore* const store = manager_.store(); store != nullptr && inference_planned()) {
    store->announce({});
  }
}

// Chunks that are in slots already leave in the order of whoever goes on now. Without a plan they
// are older than all that comes.
void Runtime::rank_anew() {
  std::vector<std::uint64_t> next_uses(layout_.chunks().size(), kNeverUsed);
  if (inference_planned()) {
    next_uses = inference_.ranks(prefetched_);
  } else if (mode_ == PassMode::kTraining && plan_ && !diverged_) {
    for (std::size_t i = plan_->accesses().size(); i-- > cursor_;) {
      for (const ChunkId chunk : layout_.chunks_of(plan_->accesses()[i].module)) {
        next_uses[index(chunk)] = i;
      }
    }
  } else if (mode_ == PassMode::kTraining) {
    std::fill(next_uses.begin(), next_uses.end(), kNeverUsed - 1 - use_counter_);
  } else {  // the order of the layout is that of execution, near enough
    std::iota(next_uses.begin(), next_uses.end(), 0);
    use_counter_ = std::max<std::uint64_t>(use_counter_, next_uses.size());
  }
  for (std::size_t i = 0; i < next_uses.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (manager_.residency().in_slot(chunk)) {
      manager_.set_next_use(chunk, next_uses[i]);
    }
  }
  inference_.look_again();
}

// Whether other chunks may stay than before.
bool Runtime::make_inference_room(std::size_t nonmodel_bytes) {
  const PlanOptions plan = plan_options();
  const std::size_t taken = plan.fixed_device_bytes + manager_.resident_bytes() + kept_by_others() +
                            std::max(nonmodel_bytes, inference_.nonmodel_peak());
  const std::size_t budget = plan.device_budget_bytes;
  return inference_.make_room_for(manager_.residency(),
                                  {.cap_bytes = budget > taken ? budget - taken : 0,
                                   .max_prefetch = options_.max_prefetch,
                                   .policy = options_.policy});
}

// A cache that grew, or a longer batch: from here on it has what it needs of those that stayed.
void Runtime::press_inference(std::size_t bytes) {
  if (inference_planned() && make_inference_room(nonmodel_->bytes() + bytes)) {
    rank_anew();
  }
}

void Runtime::prefetch_inference() {
  const CauseScope cause(timeline_, TransferCause::kPrefetch);
  std::erase_if(ahead_, [this](ChunkId chunk) CASTOR_REQUIRES(mutex_) {
    return !prefetched_[index(chunk)] || !manager_.resident(chunk);
  });
  if (manager_.counts().evictions != evictions_seen_) {
    inference_.look_again();
  }
  // A chunk that had to leave waits for none that was fetched meanwhile and is used behind it.
  const auto num_before = [this](std::uint64_t used_at) CASTOR_REQUIRES(mutex_) {
    std::size_t before = 0;
    for (const ChunkId chunk : ahead_) {
      before += manager_.residency().next_use(chunk) < used_at ? 1 : 0;
    }
    return before;
  };
  inference_.look_ahead([&, this](ChunkId chunk, std::uint64_t used_at) CASTOR_REQUIRES(mutex_) {
    return manager_.resident(chunk) ||
           (num_before(used_at) < options_.max_prefetch && !manager_.fetch_blocks(chunk) &&
            fetch_for_inference(chunk, used_at));
  });
  evictions_seen_ = manager_.counts().evictions;
  announce_params([this](std::size_t ahead) CASTOR_REQUIRES(mutex_) {
    return std::optional(inference_.upcoming(ahead));
  });
}

bool Runtime::fetch_for_inference(ChunkId chunk, std::uint64_t used_at) {
  const std::size_t bytes = layout_.chunk(chunk).capacity_bytes;
  const std::uint64_t horizon = InferencePlan::horizon(used_at);
  if (!manager_.residency().could_fit(bytes, slot_cap(), horizon) ||
      !make_room(bytes, slot_cap(), horizon)) {
    return false;
  }
  manager_.set_next_use(chunk, used_at);
  try {
    if (!manager_.try_fetch(chunk)) {
      return false;
    }
  } catch (const OutOfMemory&) {
    return false;  // the device refuses what the ledger has: the demand fetch will make room
  }
  prefetched_[index(chunk)] = true;
  ahead_.push_back(chunk);
  return true;
}

}  // namespace castor
