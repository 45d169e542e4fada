#include "core/runtime.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

constexpr ModuleId kRoot{0};
constexpr std::size_t kNoCap = ~std::size_t{0};

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
}

std::size_t share(std::size_t bytes, double ratio) {
  return static_cast<std::size_t>(static_cast<double>(bytes) * ratio);
}

}  // namespace

Runtime::Runtime(ChunkManager& manager, std::shared_ptr<NonModelMemory> nonmodel,
                 RuntimeOptions options, Clock clock)
    : manager_(manager),
      layout_(manager.layout()),
      nonmodel_(std::move(nonmodel)),
      options_(options),
      clock_(std::move(clock)),
      uses_(layout_.params().size(), 0),
      grads_missing_(layout_.chunks().size(), 0),
      prefetched_(layout_.chunks().size(), false) {
  check_options(options_);
  const Ledger& ledger = manager_.device().ledger();
  fixed_device_bytes_ = ledger.used();
  if (layout_.largest_working_set_bytes() > ledger.available()) {
    throw OutOfMemory(TierKind::kDevice, layout_.largest_working_set_bytes(), ledger.available(),
                      ledger.budget(),
                      "the chunks of module '" + layout_.module(layout_.largest_module()).name +
                          "' alone need that much at once; give device_memory at least " +
                          format_bytes(layout_.largest_working_set_bytes() + fixed_device_bytes_) +
                          " plus room for activations, or a smaller chunk_bytes");
  }
  for (std::size_t i = 0; i < grads_missing_.size(); ++i) {
    grads_missing_[i] = static_cast<std::uint32_t>(layout_.chunks()[i].params.size());
  }
  nonmodel_->set_reclaimer(this);
}

Runtime::~Runtime() {
  nonmodel_->set_reclaimer(nullptr);
  const std::lock_guard lock(mutex_);
  unwind();
}

bool Runtime::on_plan() const noexcept {
  return plan_ && !diverged_ && mode_ == PassMode::kTraining && cursor_ > 0;
}

std::size_t Runtime::slot_cap() const noexcept {
  if (mode_ == PassMode::kInference) {
    return kNoCap;
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

void Runtime::advance(EventKind kind, ModuleId module) {
  if (mode_ == PassMode::kInference) {
    return;
  }
  const auto id = static_cast<std::uint32_t>(module);
  tracer_.record(kind, id, nonmodel_->take_window_peak(), clock_());
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

void Runtime::bring_in(ChunkId chunk) {
  if (manager_.resident(chunk)) {
    return;
  }
  const std::size_t bytes = layout_.chunk(chunk).capacity_bytes;
  if (!manager_.make_room(bytes, slot_cap(), now(), 0)) {
    throw_out_of_memory(bytes);
  }
  manager_.fetch(chunk);
  ++counts_.demand_fetches;
}

void Runtime::acquire(ModuleId module, std::vector<Pin>* pins) {
  const auto& chunks = layout_.chunks_of(module);
  const bool planned = on_plan();
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const std::uint64_t next_use =
        planned ? plan_->next_uses(plan_->accesses()[cursor_ - 1], chunks.size())[i]
                : unplanned_rank();
    manager_.set_next_use(chunks[i], next_use);
  }
  // What is there already is pinned first, so that making room for the rest cannot evict it.
  const std::size_t first = pins->size();
  try {
    for (const ChunkId chunk : chunks) {
      if (manager_.resident(chunk)) {
        pins->push_back(manager_.pin(chunk));
        counts_.prefetch_hits += prefetched_[index(chunk)] ? 1 : 0;
        prefetched_[index(chunk)] = false;
      }
    }
    if (pins->size() - first < chunks.size()) {
      for (const ChunkId chunk : chunks) {
        if (!manager_.resident(chunk)) {
          bring_in(chunk);
          pins->push_back(manager_.pin(chunk));
          prefetched_[index(chunk)] = false;
        }
      }
    }
  } catch (...) {
    pins->resize(first);
    throw;
  }
  begin_use(module);
  if (planned) {
    // The plan's cap leaves room for the non-model bytes until the next access.
    static_cast<void>(manager_.make_room(0, slot_cap(), now(), 0));
    prefetch();
  }
}

void Runtime::prefetch() {
  for (const Prefetch& ahead : plan_->prefetches(plan_->accesses()[cursor_ - 1])) {
    if (manager_.resident(ahead.chunk)) {
      continue;
    }
    manager_.set_next_use(ahead.chunk, ahead.used_at);
    if (manager_.make_room(layout_.chunk(ahead.chunk).capacity_bytes, slot_cap(), now(),
                           ahead.used_at + 1)) {
      manager_.fetch(ahead.chunk);
      prefetched_[index(ahead.chunk)] = true;
    }
  }
}

void Runtime::begin_use(ModuleId module) {
  for (const ParamId param : layout_.module(module).params) {
    ++uses_[index(param)];
    if (manager_.state(param) != TensorState::kReadyForReduce) {
      manager_.set_state(param, TensorState::kCompute);
    }
  }
}

void Runtime::end_use(ModuleId module, TensorState after) {
  for (const ParamId param : layout_.module(module).params) {
    if (--uses_[index(param)] == 0 && manager_.state(param) == TensorState::kCompute) {
      manager_.set_state(param, after);
    }
  }
}

void Runtime::enter(ModuleId module, PassMode mode) {
  const std::lock_guard lock(mutex_);
  if (module == kRoot) {
    unwind();  // what an interrupted forward left entered
  }
  if (frames_.empty()) {
    mode_ = mode;
  }
  leave_backward();
  advance(EventKind::kForwardEnter, module);
  const std::size_t first_pin = forward_pins_.size();
  acquire(module, &forward_pins_);
  frames_.push_back({module, first_pin});
}

void Runtime::exit(ModuleId module) {
  const std::lock_guard lock(mutex_);
  const auto is_module = [module](const Frame& frame) { return frame.module == module; };
  if (std::none_of(frames_.begin(), frames_.end(), is_module)) {
    return;  // its enter failed
  }
  advance(EventKind::kForwardExit, module);
  bool found = false;
  while (!found) {
    const Frame frame = frames_.back();
    frames_.pop_back();
    end_use(frame.module, TensorState::kHold);
    forward_pins_.resize(frame.first_pin);
    found = frame.module == module;
  }
}

void Runtime::enter_backward(ModuleId module) {
  const std::lock_guard lock(mutex_);
  mode_ = PassMode::kTraining;
  leave_backward();
  advance(EventKind::kBackwardEnter, module);
  acquire(module, &backward_pins_);
  backward_module_ = module;
}

void Runtime::leave_backward() {
  if (backward_module_) {
    end_use(*backward_module_, TensorState::kHoldAfterBackward);
    backward_pins_.clear();
    backward_module_.reset();
  }
}

void Runtime::grad_ready(ParamId param) {
  const std::lock_guard lock(mutex_);
  if (manager_.state(param) == TensorState::kReadyForReduce) {
    return;  // a reentrant checkpoint delivers a gradient in parts
  }
  manager_.set_state(param, TensorState::kReadyForReduce);
  const ChunkId chunk = layout_.place(param).chunk;
  if (--grads_missing_[index(chunk)] > 0) {
    return;
  }
  // The chunk's gradients are complete: with one rank there is nothing to reduce.
  const auto& params = layout_.chunk(chunk).params;
  grads_missing_[index(chunk)] = static_cast<std::uint32_t>(params.size());
  const TensorState after = manager_.resident(chunk) ? TensorState::kHold : TensorState::kFree;
  for (const ParamId ready : params) {
    manager_.set_state(ready, after);
    if (uses_[index(ready)] > 0) {
      manager_.set_state(ready, TensorState::kCompute);
    }
  }
  tracer_.record(EventKind::kGradReady, static_cast<std::uint32_t>(chunk),
                 nonmodel_->take_window_peak(), clock_());
}

void Runtime::unwind() {
  leave_backward();
  while (!frames_.empty()) {
    end_use(frames_.back().module, TensorState::kHold);
    forward_pins_.resize(frames_.back().first_pin);
    frames_.pop_back();
  }
}

void Runtime::send_home() {
  const std::lock_guard lock(mutex_);
  unwind();
  manager_.send_home();
  std::fill(prefetched_.begin(), prefetched_.end(), false);
}

void Runtime::finish_step() {
  const std::lock_guard lock(mutex_);
  unwind();
  manager_.send_home();
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const auto& params = layout_.chunk(chunk).params;
    if (grads_missing_[i] != params.size()) {  // some parameter got no gradient this step
      grads_missing_[i] = static_cast<std::uint32_t>(params.size());
      for (const ParamId param : params) {
        if (manager_.state(param) == TensorState::kReadyForReduce) {
          manager_.set_state(param,
                             manager_.resident(chunk) ? TensorState::kHold : TensorState::kFree);
        }
      }
    }
  }
  ++counts_.steps;
  learn_from_step();
  cursor_ = 0;
  diverged_ = false;
  pressure_at_step_start_ = counts_.pressure_evictions;
}

void Runtime::learn_from_step() {
  const bool complete = tracer_.complete();
  Trace step = tracer_.finish(nonmodel_->take_window_peak());
  if (!complete || step.num_accesses() == 0) {
    return;
  }
  if (!trace_) {
    trace_ = std::move(step);
  } else if (step.signature() == trace_->signature()) {
    last_divergent_.reset();
    const bool pressed = counts_.pressure_evictions != pressure_at_step_start_;
    if (plan_ && !pressed) {
      return;
    }
    // The non-model curve rose above the plan's.
    trace_ = step.events().size() == trace_->events().size() ? trace_->merged_with(step)
                                                             : std::move(step);
  } else {
    ++counts_.divergent_steps;
    if (last_divergent_ != step.signature()) {
      last_divergent_ = step.signature();
      return;
    }
    last_divergent_.reset();
    trace_ = std::move(step);
  }
  plan_from_trace();
}

void Runtime::plan_from_trace() {
  std::vector<Placement> placements(layout_.chunks().size());
  for (std::size_t i = 0; i < placements.size(); ++i) {
    placements[i] = manager_.placement(ChunkId{static_cast<std::uint32_t>(i)});
  }
  plan_ = make_plan(
      *trace_, layout_, placements,
      {.device_budget_bytes = share(manager_.device().ledger().budget(), options_.steady_cap_ratio),
       .fixed_device_bytes = fixed_device_bytes_,
       .max_prefetch = options_.max_prefetch,
       .policy = options_.policy});
  ++counts_.plans;
}

void Runtime::reclaim(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t before = manager_.counts().evictions;
  bool fits = manager_.make_room(bytes, kNoCap, now(), 0);
  if (!fits && !backward_pins_.empty()) {
    // Backward may run on from the home copies: slower, but it runs.
    leave_backward();
    fits = manager_.make_room(bytes, kNoCap, now(), 0);
  }
  counts_.pressure_evictions += manager_.counts().evictions - before;
  if (!fits) {
    throw_out_of_memory(bytes);
  }
}

void Runtime::throw_out_of_memory(std::size_t bytes) const {
  const Ledger& ledger = manager_.device().ledger();
  std::string where = "outside any module";
  if (!frames_.empty()) {
    where = "in the forward of module '" + layout_.module(frames_.back().module).name + "'";
  } else if (backward_module_) {
    where = "in the backward of module '" + layout_.module(*backward_module_).name + "'";
  }
  const std::size_t pinned = manager_.pinned_bytes();
  const std::size_t activations = nonmodel_->bytes();
  std::size_t smallest = fixed_device_bytes_ + pinned + activations + bytes;
  if (plan_) {
    smallest = std::max(smallest, plan_->prediction().smallest_budget_bytes);
  }
  throw OutOfMemory(TierKind::kDevice, bytes, ledger.available(), ledger.budget(),
                    where + ": chunks in use take " + format_bytes(pinned) +
                        " and activations and temporaries " + format_bytes(activations) +
                        "; the smallest budget that gets past this point is " +
                        format_bytes(smallest) +
                        ": raise device_memory to that or more, make the batch smaller, or turn "
                        "on gradient checkpointing");
}

void Runtime::load_trace(Trace trace) {
  const std::lock_guard lock(mutex_);
  if (!tracer_.empty()) {
    throw UsageError("a trace is loaded in the middle of a step; load it before the first forward");
  }
  trace_ = std::move(trace);
  plan_from_trace();
}

std::optional<Trace> Runtime::trace() const {
  const std::lock_guard lock(mutex_);
  return trace_;
}

std::optional<Prediction> Runtime::prediction() const {
  const std::lock_guard lock(mutex_);
  return plan_ ? std::optional(plan_->prediction()) : std::nullopt;
}

RuntimeCounts Runtime::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

TransferCounts Runtime::transfers() const {
  const std::lock_guard lock(mutex_);
  return manager_.counts();
}

bool Runtime::idle() const {
  const std::lock_guard lock(mutex_);
  return frames_.empty();
}

}  // namespace castor
