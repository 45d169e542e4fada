#include "core/runtime.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

void check_options(const RuntimeOptions& options) {
  if (!(options.warmup_nonmodel_ratio >= 0.0 && options.warmup_nonmodel_ratio < 1.0)) {
    throw InvalidArgument("warmup_non_model_data_ratio is " +
                          std::to_string(options.warmup_nonmodel_ratio) +
                          "; it must lie in [0, 1)");
  }
  if (!(options.steady_cap_ratio > 0.0 && options.steady_cap_ratio <= 1.0)) {
    throw InvalidArgument("steady_cuda_cap_ratio is " + std::to_string(options.steady_cap_ratio) +
                          "; it must lie in (0, 1]");
  }
  if (!(options.margin_ratio >= 0.0 && options.margin_ratio <= 1.0)) {
    throw InvalidArgument("gpu_margin_mem_ratio is " + std::to_string(options.margin_ratio) +
                          "; it must lie in [0, 1]");
  }
}

std::size_t share(std::size_t bytes, double ratio) {
  return static_cast<std::size_t>(static_cast<double>(bytes) * ratio);
}

struct WorkingSet {
  std::size_t bytes = 0;
  ModuleId module{};
};

// Of the chunks that need a slot: a module's and those of the modules around it.
WorkingSet largest_working_set(const ChunkManager& manager) {
  const ChunkLayout& layout = manager.layout();
  WorkingSet largest;
  std::vector<std::size_t> counted_for(layout.chunks().size(), layout.modules().size());
  for (std::size_t i = 0; i < layout.modules().size(); ++i) {
    std::size_t bytes = 0;
    std::optional<ModuleId> module = ModuleId{static_cast<std::uint32_t>(i)};
    for (; module; module = layout.module(*module).parent) {
      for (const ChunkId chunk : layout.chunks_of(*module)) {
        if (counted_for[index(chunk)] != i && manager.placement(chunk) != Placement::kDevice) {
          counted_for[index(chunk)] = i;
          bytes += layout.chunk(chunk).capacity_bytes;
        }
      }
    }
    if (bytes > largest.bytes) {
      largest = {bytes, ModuleId{static_cast<std::uint32_t>(i)}};
    }
  }
  return largest;
}

}  // namespace

Runtime::Runtime(ChunkManager& manager, std::shared_ptr<NonModelMemory> nonmodel,
                 RuntimeOptions options, Clock clock, std::shared_ptr<RuntimeGroup> group,
                 std::unique_ptr<DeviceClock> device_clock)
    : group_(group ? std::move(group) : std::make_shared<RuntimeGroup>()),
      mutex_(group_->mutex()),
      manager_(manager),
      layout_(manager.layout()),
      nonmodel_(std::move(nonmodel)),
      nonmodel_peaks_(nonmodel_->peaks(), nonmodel_->bytes()),
      inference_peaks_(nonmodel_->peaks(), nonmodel_->bytes()),
      options_(options),
      clock_(std::move(clock)),
      uses_(layout_.params().size(), 0),
      gradients_(layout_),
      prefetched_(layout_.chunks().size(), false),
      read_by_row_(layout_.chunks().size(), false),
      timeline_(clock_, layout_.chunks().size()),
      step_clock_(std::move(device_clock)) {
  check_options(options_);
  const Ledger& ledger = manager_.device().ledger();
  fixed_device_bytes_ = ledger.used();
  {
    const MutexLock lock(mutex_);
    std::size_t fixed = fixed_device_bytes_;
    for_each_other([&](const Runtime& other)
                       CASTOR_NOT_ANALYZED { fixed += other.fixed_device_bytes_; });
    const std::size_t room = ledger.budget() - std::min(ledger.budget(), fixed);
    if (layout_.largest_working_set_bytes() > room) {
      // Chunks that live on the device are paid for already.
      if (const WorkingSet largest = largest_working_set(manager_); largest.bytes > room) {
        throw ledger.out_of_memory(
            largest.bytes, "the chunks of module '" + layout_.module(largest.module).name +
                               "' alone need that much at once; give device_memory at least " +
                               format_bytes(largest.bytes + fixed) +
                               " plus room for activations, or a smaller chunk_bytes");
      }
    }
    manager_.record_into(&timeline_);
    group_->join(this);
    used_by_this_thread();
  }
  nonmodel_->add_reclaimer(this);
}

Runtime::~Runtime() {
  nonmodel_->remove_reclaimer(this);
  const MutexLock lock(mutex_);
  group_->leave(this);
  frames_.release_all();
  manager_.record_into(nullptr);
}

bool Runtime::on_plan() const noexcept {
  return plan_ && !diverged_ && mode_ == PassMode::kTraining && cursor_ > 0;
}

std::size_t Runtime::slot_cap() const noexcept {
  if (mode_ == PassMode::kInference) {
    return inference_.followed() ? inference_.cap_bytes() : kNoCap;
  }
  const std::size_t budget = manager_.device().ledger().budget();
  if (on_plan()) {
    return plan_->accesses()[cursor_ - 1].slot_cap_bytes;
  }
  return plan_ ? kNoCap : share(budget, 1.0 - options_.warmup_nonmodel_ratio);
}

// Without a plan: in training the least recently used chunk goes first, since backward visits the
// modules in reverse; in inference, which runs round and round, the most recently used one.
std::uint64_t Runtime::unplanned_rank() {
  ++use_counter_;
  return mode_ == PassMode::kInference ? use_counter_ : kNeverUsed - 1 - use_counter_;
}

// Of the access under way, for the i-th chunk of its module.
std::uint64_t Runtime::next_use(ModuleId module, std::size_t i) {
  if (inference_planned()) {
    return inference_.rank(i);
  }
  const std::size_t num_chunks = layout_.chunks_of(module).size();
  return on_plan() ? plan_->next_uses(plan_->accesses()[cursor_ - 1], num_chunks)[i]
                   : unplanned_rank();
}

void Runtime::record(EventKind kind, std::uint32_t id) {
  if (!tracer_.complete()) {
    timeline_.drop_event();
    return;
  }
  const std::uint64_t now_ns = clock_();
  Ledger& device = manager_.device().ledger();
  if (tracer_.empty()) {
    std::vector<ChunkId> resident;
    std::vector<ChunkId> on_device;
    for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
      const ChunkId chunk{static_cast<std::uint32_t>(i)};
      if (manager_.placement(chunk) == Placement::kDevice) {
        on_device.push_back(chunk);
      } else if (manager_.resident(chunk)) {
        resident.push_back(chunk);
      }
    }
    timeline_.begin(now_ns, std::move(resident), std::move(on_device));
    const bool asked = std::exchange(time_next_step_, false);
    if (asked || !plan_) {
      step_clock_.begin();
    }
  }
  // What others keep is that of the moment before, until this one.
  const std::size_t others = std::exchange(others_now_, kept_by_others());
  others_peak_ = std::max(others_peak_, others_now_);
  tracer_.record(kind, id, nonmodel_peaks_.take(nonmodel_->bytes()) + others, now_ns);
  timeline_.event(manager_.slot_bytes(), manager_.host().ledger().used(),
                  device.take_window_peak());
  const StreamId stream = manager_.device().stream();
  if (Event{.kind = kind}.is_access()) {
    step_clock_.await_chunks(stream);
  } else {
    step_clock_.event(stream);
  }
}

void Runtime::advance(EventKind kind, ModuleId module) {
  if (mode_ == PassMode::kInference) {
    if (kind == EventKind::kForwardEnter && inference_.enter(module)) {
      rank_anew();
    }
    return;
  }
  record(kind, static_cast<std::uint32_t>(module));
  if (kind == EventKind::kForwardExit) {
    return;
  }
  ++cursor_;
  if (plan_ && !diverged_) {
    diverged_ = cursor_ > plan_->accesses().size() ||
                plan_->accesses()[cursor_ - 1].module != module ||
                plan_->accesses()[cursor_ - 1].kind != kind;
  }
}

void Runtime::acquire(EventKind kind, ModuleId module, std::vector<Pin>* pins) {
  const auto& chunks = layout_.chunks_of(module);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    manager_.set_next_use(chunks[i], next_use(module, i));
    if (mode_ == PassMode::kTraining) {
      read_by_row_[index(chunks[i])] = false;
    }
  }
  pin_all(
      chunks, manager_.residency(), pins,
      [&](ChunkId chunk) CASTOR_REQUIRES(mutex_) { bring_in(chunk, kind, module); },
      [&](ChunkId chunk) CASTOR_REQUIRES(mutex_) {
        Pin pin = manager_.pin(chunk);
        counts_.prefetch_hits += prefetched_[index(chunk)] ? 1 : 0;
        prefetched_[index(chunk)] = false;
        return pin;
      });
  if (on_plan() || inference_planned()) {
    // The plan's cap leaves room for the non-model bytes until the next access.
    const CauseScope cause(timeline_, TransferCause::kPlan);
    static_cast<void>(make_room(0, slot_cap()));
    on_plan() ? prefetch() : prefetch_inference();
  }
  trim_slots();
  if (mode_ == PassMode::kTraining) {
    step_clock_.compute(manager_.device().stream());
  }
}

// What non-model bytes take, or the cap leaves to them, is theirs in fact: free slots are resident
// too.
void Runtime::trim_slots() {
  const Ledger& device = manager_.device().ledger();
  const std::size_t slots = manager_.slot_bytes();
  const std::size_t room = std::min(std::max(slot_cap(), slots) - slots, device.available());
  const std::size_t kept = std::min(options_.kept_slot_bytes, device.budget() / 8);
  manager_.trim_slots(room + kept);
  // Here and not where an allocation makes them leave: within an operator, which may read them.
  for_each_other([kept](Runtime& other) CASTOR_NOT_ANALYZED {
    if (other.yields()) {
      other.manager_.trim_slots(kept);
    }
  });
}

void Runtime::prefetch() {
  const CauseScope cause(timeline_, TransferCause::kPrefetch);
  for (const Prefetch& ahead : plan_->prefetches(plan_->accesses()[cursor_ - 1])) {
    if (read_by_row_[index(ahead.chunk)] || manager_.resident(ahead.chunk) ||
        manager_.fetch_blocks(ahead.chunk)) {
      continue;
    }
    manager_.set_next_use(ahead.chunk, ahead.used_at);
    if (make_room(layout_.chunk(ahead.chunk).capacity_bytes, ahead.slot_cap_bytes,
                  ahead.used_at + 1)) {
      try {
        prefetched_[index(ahead.chunk)] = manager_.try_fetch(ahead.chunk);
      } catch (const OutOfMemory&) {
        return;  // the device refuses what the ledger has: the demand fetch will make room
      }
    }
  }
  announce_params(upcoming_modules(*plan_, cursor_));
}

// Host storage on NVMe comes into memory further ahead than slots are fetched.
void Runtime::announce_params(const UpcomingModule& upcoming) {
  if (ParamStore* const store = manager_.store()) {
    store->announce(upcoming_chunks(upcoming, layout_, store->max_leases(),
                                    [this](ChunkId chunk) CASTOR_REQUIRES(mutex_) {
                                      return manager_.stored(chunk) && !manager_.resident(chunk);
                                    }));
  }
}

std::optional<Pin> Runtime::pin_for_operator(ChunkId chunk, StreamId stream, PayloadKind used) {
  const MutexLock lock(mutex_);
  const bool there = used == PayloadKind::kParam ? manager_.bound(chunk)
                                                 : manager_.placement(chunk) == Placement::kDevice;
  return there ? std::optional(manager_.pin_for_operator(chunk, stream)) : std::nullopt;
}

void Runtime::take_copy(ChunkId chunk) {
  const MutexLock lock(mutex_);
  manager_.take_copy(chunk);
}

void Runtime::drop_copy(ChunkId chunk) {
  const MutexLock lock(mutex_);
  manager_.drop_copy(chunk);
}

void Runtime::unpin(std::vector<Pin>& pins) noexcept {
  {
    const MutexLock lock(mutex_);
    pins.clear();
  }
  operators_over_.notify_all();
}

// Those of other threads: they go on without the runtime's mutex.
void Runtime::await_operators(MutexLock& lock) {
  operators_over_.wait(lock.native(), [this]() CASTOR_REQUIRES(mutex_) {
    return manager_.num_operator_pins() == 0;
  });
}

void Runtime::begin_use(ModuleId module) {
  for (const ParamId param : layout_.module(module).params) {
    ++uses_[index(param)];
    if (manager_.state(param) != TensorState::kReadyForReduce) {
      manager_.set_state(param, TensorState::kCompute);
    }
  }
}

void Runtime::end_use(ModuleId module, Pass pass) {
  const TensorState after =
      pass == Pass::kForward ? TensorState::kHold : TensorState::kHoldAfterBackward;
  for (const ParamId param : layout_.module(module).params) {
    if (--uses_[index(param)] == 0 && manager_.state(param) == TensorState::kCompute) {
      manager_.set_state(param, after);
    }
  }
}

void Runtime::enter(ModuleId module, PassMode mode) {
  const MutexLock lock(mutex_);
  used_by_this_thread();
  frames_.begin_forward(module);
  note_frames();
  if (frames_.no_forward()) {
    begin_pass(module, mode);
  }
  advance(EventKind::kForwardEnter, module);
  frames_.enter_forward(module, [&](std::vector<Pin>* pins) CASTOR_REQUIRES(mutex_) {
    acquire(EventKind::kForwardEnter, module, pins);
  });
  note_frames();
  begin_use(module);
}

void Runtime::exit(ModuleId module) {
  const MutexLock lock(mutex_);
  if (!frames_.entered(module)) {
    return;  // its enter failed
  }
  advance(EventKind::kForwardExit, module);
  frames_.exit_forward(module);
  note_frames();
  if (frames_.no_forward()) {
    end_pass();
  }
}

void Runtime::enter_backward(ModuleId module) {
  const MutexLock lock(mutex_);
  used_by_this_thread();
  frames_.end_backward();
  change_mode(PassMode::kTraining);
  advance(EventKind::kBackwardEnter, module);
  frames_.enter_backward(module, [&](std::vector<Pin>* pins) CASTOR_REQUIRES(mutex_) {
    acquire(EventKind::kBackwardEnter, module, pins);
  });
  begin_use(module);
}

bool Runtime::grad_ready(ParamId param, const GradientCopy& copy) {
  const MutexLock lock(mutex_);
  const ChunkId chunk = layout_.place(param).chunk;
  if (copy.bytes > 0) {
    timeline_.gradient_copied(chunk, copy.bytes, copy.start_ns, copy.end_ns);
  }
  if (manager_.state(param) != TensorState::kReadyForReduce) {
    manager_.set_state(param, TensorState::kReadyForReduce);
  }
  if (!gradients_.add(param)) {
    return false;
  }
  // The chunk's gradients are complete: with one rank there is nothing to reduce.
  const TensorState after = manager_.resident(chunk) ? TensorState::kHold : TensorState::kFree;
  for (const ParamId ready : layout_.chunk(chunk).params) {
    manager_.set_state(ready, after);
    if (uses_[index(ready)] > 0) {
      manager_.set_state(ready, TensorState::kCompute);
    }
  }
  record(EventKind::kGradReady, static_cast<std::uint32_t>(chunk));
  return true;
}

bool Runtime::retire(ChunkId chunk) {
  const MutexLock lock(mutex_);
  if (manager_.pins(chunk) > 0) {
    return false;
  }
  manager_.settle_writes(chunk);
  if (manager_.placement(chunk) == Placement::kDevice || !manager_.resident(chunk)) {
    return true;
  }
  const CauseScope cause(timeline_, TransferCause::kBackward);
  manager_.evict(chunk);
  prefetched_[index(chunk)] = false;
  return true;
}

void Runtime::set_spare(SpareMemory* spare) {
  const MutexLock lock(mutex_);
  spare_ = spare;
}

bool Runtime::begin_rows(std::span<const ChunkId> chunks) {
  const MutexLock lock(mutex_);
  if (mode_ != PassMode::kInference || frames_.no_forward() || !may_leave(chunks)) {
    return false;
  }
  const CauseScope cause(timeline_, TransferCause::kPlan);
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (layout_.chunk(chunk).by_row && manager_.pins(chunk) == 0) {
      leave_slot(chunk);
    }
  }
  return true;
}

bool Runtime::begin_rows_of_step(std::span<const ChunkId> chunks) {
  const MutexLock lock(mutex_);
  if (mode_ != PassMode::kTraining || !plan_ || !may_leave(chunks)) {
    return false;
  }
  const CauseScope cause(timeline_, TransferCause::kPlan);
  for (const ChunkId chunk : chunks) {
    leave_slot(chunk);
    read_by_row_[index(chunk)] = true;
  }
  return true;
}

void Runtime::expect_rows_of_step(std::span<const ChunkId> chunks) {
  const MutexLock lock(mutex_);
  for (const ChunkId chunk : chunks) {
    read_by_row_[index(chunk)] = true;
  }
}

bool Runtime::may_leave(std::span<const ChunkId> chunks) const {
  return std::ranges::none_of(chunks, [this](ChunkId chunk) CASTOR_REQUIRES(mutex_) {
    return manager_.placement(chunk) == Placement::kDevice || manager_.pins(chunk) > 0;
  });
}

void Runtime::leave_slot(ChunkId chunk) {
  if (manager_.residency().in_slot(chunk)) {
    manager_.evict(chunk);
    prefetched_[index(chunk)] = false;
  }
}

std::size_t Runtime::lasting_bytes() const {
  const MutexLock lock(mutex_);
  return fixed_device_bytes_ + manager_.resident_bytes();
}

void Runtime::all_to_host() {
  const CauseScope cause(timeline_, TransferCause::kStepEnd);
  frames_.release_all();
  note_frames();
  manager_.move_to_host();
  std::fill(prefetched_.begin(), prefetched_.end(), false);
  forget_round_ahead();
}

void Runtime::move_to_host() {
  MutexLock lock(mutex_);
  await_operators(lock);
  all_to_host();
}

void Runtime::begin_update() {
  MutexLock lock(mutex_);
  await_operators(lock);
  used_by_this_thread();
  timeline_.begin_update();
  step_clock_.end_passes(manager_.device().stream());
  all_to_host();
}

void Runtime::finish_step() {
  MutexLock lock(mutex_);
  await_operators(lock);
  step_clock_.end_passes(manager_.device().stream());
  all_to_host();
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    gradients_.forget(chunk);
    for (const ParamId param : layout_.chunk(chunk).params) {
      if (manager_.state(param) == TensorState::kReadyForReduce) {  // others of it got none
        manager_.set_state(param,
                           manager_.resident(chunk) ? TensorState::kHold : TensorState::kFree);
      }
    }
  }
  ++counts_.steps;
  learn_from_step();
  begin_next_step();
}

void Runtime::learn_from_step() {
  const bool complete = tracer_.complete();
  const std::size_t device_peak = manager_.device().ledger().take_window_peak();
  Trace recorded = tracer_.finish(nonmodel_peaks_.take(nonmodel_->bytes()) + others_now_);
  if (recorded.num_accesses() == 0) {
    timeline_.finish({}, device_peak, Guidance::kDemand);
    step_clock_.abandon();
    return;
  }
  step_clock_.finish();
  timeline_.finish(std::move(recorded), device_peak,
                   !plan_      ? Guidance::kDemand
                   : diverged_ ? Guidance::kDiverged
                               : Guidance::kPlan);
  if (!complete) {
    return;
  }
  const Trace& step = timeline_.last().trace;
  if (!trace_) {
    plan_from(step);
  } else if (step.signature() == trace_->signature()) {
    last_divergent_.reset();
    const bool demoted = manager_.counts().demotions != demotions_at_step_start_;
    const bool pressed = demoted || pressed_ || others_peak_ > others_planned_;
    if (plan_ && !pressed && placed_) {
      return;
    }
    Trace merged =
        step.events().size() == trace_->events().size() ? trace_->merged_with(step) : step;
    if (!placed_ || demoted || manager_.resident_bytes() > 0) {
      placement_trace_ = merged;
    }
    if (!plan_ || pressed) {  // the non-model curve, or that of others, rose above the plan's
      plan_from(std::move(merged));
    }
  } else {
    ++counts_.divergent_steps;
    if (last_divergent_ != step.signature()) {
      last_divergent_ = step.signature();
      return;
    }
    last_divergent_.reset();
    placement_trace_ = step;
    plan_from(step);
  }
}

void Runtime::load_trace(Trace trace) {
  const MutexLock lock(mutex_);
  if (!tracer_.empty()) {
    throw UsageError("a trace is loaded in the middle of a step; load it before the first forward");
  }
  plan_from(std::move(trace));
}

std::optional<Trace> Runtime::trace() const {
  const MutexLock lock(mutex_);
  return trace_;
}

std::optional<Prediction> Runtime::prediction() const {
  const MutexLock lock(mutex_);
  return plan_ ? std::optional(plan_->prediction()) : std::nullopt;
}

RuntimeCounts Runtime::counts() const {
  const MutexLock lock(mutex_);
  RuntimeCounts counts = counts_;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    counts.resident_chunks += manager_.promoted(ChunkId{static_cast<std::uint32_t>(i)}) ? 1 : 0;
  }
  counts.resident_bytes = manager_.resident_bytes();
  return counts;
}

std::size_t Runtime::num_events() const {
  const MutexLock lock(mutex_);
  return tracer_.size();
}

Timeline Runtime::timeline() {
  const MutexLock lock(mutex_);
  timeline_.time_last(step_clock_);
  return timeline_.last();
}

bool Runtime::time_next_step() {
  const MutexLock lock(mutex_);
  time_next_step_ = step_clock_.present();
  return time_next_step_;
}

bool Runtime::device_times_pending() const {
  const MutexLock lock(mutex_);
  return step_clock_.pending();
}

std::size_t Runtime::step_peak_device_bytes() const {
  const MutexLock lock(mutex_);
  return timeline_.last().peak_device_bytes;
}

TransferCounts Runtime::transfers() const {
  const MutexLock lock(mutex_);
  return manager_.counts();
}

}  // namespace castor
