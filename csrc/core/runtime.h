#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arrived_gradients.h"
#include "core/chunk_manager.h"
#include "core/inference_plan.h"
#include "core/module_frames.h"
#include "core/mutex.h"
#include "core/nonmodel_memory.h"
#include "core/planner.h"
#include "core/runtime_group.h"
#include "core/runtime_options.h"
#include "core/timeline.h"
#include "core/trace.h"

namespace castor {

/// Whether a forward prepares a backward (and is traced) or only computes.
enum class PassMode : std::uint8_t { kTraining, kInference };

/// How a gradient came to its payload: bytes that went from the device to the host, and when, by
/// the runtime's clock. Nothing was copied where bytes are 0.
struct GradientCopy {
  std::uint64_t bytes = 0;
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
};

/// Counters since construction, and what is promoted now.
struct RuntimeCounts {
  std::uint64_t steps = 0;
  std::uint64_t demand_fetches = 0;
  std::uint64_t prefetch_hits = 0;
  std::uint64_t pressure_evictions = 0;  ///< by an allocation that did not fit
  std::uint64_t divergent_steps = 0;
  std::uint64_t plans = 0;
  std::uint64_t resident_chunks = 0;  ///< now: wholly on the device by promotion
  std::uint64_t resident_bytes = 0;   ///< device bytes that they take
};

/// Follows a training step moment by moment and keeps what it needs on the device: traces the first
/// step, plans from the trace, then runs the plan. A step that leaves the plan runs on demand, is
/// counted, and becomes the plan when it repeats. Inference has a plan of its own, made of what it
/// did last (InferencePlan); neither changes the other's.
///
/// With others in its group it shares the device budget (docs/design/0038): what it needs room for
/// makes chunks of theirs leave first, and its plans leave room for what of theirs stays.
///
/// Thread-safe: one mutex, the group's, taken by every member function after NonModelMemory's.
/// Callers must not allocate non-model memory while inside. One C++ call per module event, O(own
/// parameters + log chunks).
class Runtime final : public Reclaimer {
 public:
  using Clock = TimelineRecorder::Clock;

  /// Throws OutOfMemory naming the module whose chunks alone exceed the device budget, and
  /// InvalidArgument for options out of range. `group`: of those that take from the same device
  /// budget; nullptr: it is alone.
  Runtime(ChunkManager& manager, std::shared_ptr<NonModelMemory> nonmodel, RuntimeOptions options,
          Clock clock, std::shared_ptr<RuntimeGroup> group = nullptr);
  ~Runtime() override;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// Before a module's forward: its chunks are resident, pinned and bound on return.
  /// `mode` counts at the outermost module. Module 0 is the model: entering it releases whatever an
  /// interrupted pass left entered. Throws OutOfMemory.
  void enter(ModuleId module, PassMode mode);
  /// After a module's forward, or when it failed: releases it and whatever it left entered.
  void exit(ModuleId module);
  /// At the first gradient of a module's outputs. Releases the module entered before it in
  /// backward.
  void enter_backward(ModuleId module);
  /// A parameter's gradient is complete in its chunk's payload, or on its way there. Returns
  /// whether those of the whole chunk are now.
  bool grad_ready(ParamId param, const GradientCopy& copy = {});
  /// Holds the chunk for an operator of `stream` if what that uses of it, parameters or gradients,
  /// is in device memory now. Given back by unpin on the same thread.
  [[nodiscard]] std::optional<Pin> hold(ChunkId chunk, StreamId stream = {},
                                        PayloadKind used = PayloadKind::kParam);
  void unpin(std::vector<Pin>& pins) noexcept;
  /// Sends a chunk home whose gradients are complete, user writes with it, so that it can be
  /// updated while backward goes on. False, and nothing happened, while a module under way pins it.
  [[nodiscard]] bool retire(ChunkId chunk);
  /// Ends forward and backward: every chunk goes home, user writes with it. Parameters may be read
  /// and written freely until the next enter. Idempotent.
  void send_home();
  /// As send_home, at the beginning of the optimizer's update.
  void begin_update();
  /// Ends the step after the optimizer updated the home copies: closes the trace and plans.
  void finish_step();
  /// Whether place() has something to decide: the first step by plan is over, or the plan changed.
  [[nodiscard]] bool placement_due() const;
  /// Between steps: promotes what had better live on the device (choose_promotions) of
  /// `candidates`, one entry per chunk, and plans again where that changes anything. Promoted
  /// chunks that memory is needed for later give way by themselves. No update may be pending, nor a
  /// gradient be on its way. Rethrows a copy's failure; what moved before stays there.
  void place(const std::vector<bool>& candidates);

  /// Before another model joins the group: of all models in it everything leaves that may.
  static void make_way(RuntimeGroup& group);
  /// Device bytes of the other models that stay while this one works: what lives on the device,
  /// activations, chunks in use.
  [[nodiscard]] std::size_t bytes_of_others() const;

  void reclaim(std::size_t bytes) override;
  [[nodiscard]] bool evict_refused(std::size_t bytes) override;

  /// Plans from a trace recorded earlier, so that no warm-up step is needed. Throws UsageError in
  /// the middle of a step and InvalidArgument for another model's trace; nothing changes then.
  void load_trace(Trace trace);
  [[nodiscard]] std::optional<Trace> trace() const;
  [[nodiscard]] std::optional<Prediction> prediction() const;
  [[nodiscard]] RuntimeCounts counts() const;
  /// Moments of the step under way so far.
  [[nodiscard]] std::size_t num_moments() const;
  /// Of the last finished training step; without events before there is one.
  [[nodiscard]] Timeline timeline() const;
  [[nodiscard]] std::size_t step_peak_device_bytes() const;
  [[nodiscard]] TransferCounts transfers() const;
  [[nodiscard]] std::uint64_t clock_ns() const { return clock_(); }
  /// Whether no module is entered.
  [[nodiscard]] bool idle() const;

 private:
  void begin_pass(ModuleId module, PassMode mode) CASTOR_REQUIRES(mutex_);
  void change_mode(PassMode mode) CASTOR_REQUIRES(mutex_);
  void forget_round_ahead() CASTOR_REQUIRES(mutex_);
  void rank_anew() CASTOR_REQUIRES(mutex_);
  void end_pass() CASTOR_REQUIRES(mutex_);
  bool make_inference_room(std::size_t nonmodel_bytes) CASTOR_REQUIRES(mutex_);
  void press_inference(std::size_t bytes) CASTOR_REQUIRES(mutex_);
  void note_pressure(std::uint64_t evictions) CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t next_use(ModuleId module, std::size_t i) CASTOR_REQUIRES(mutex_);
  void record(EventKind kind, std::uint32_t id) CASTOR_REQUIRES(mutex_);
  void advance(EventKind kind, ModuleId module) CASTOR_REQUIRES(mutex_);
  void acquire(EventKind kind, ModuleId module, std::vector<Pin>* pins) CASTOR_REQUIRES(mutex_);
  void bring_in(ChunkId chunk, EventKind kind, ModuleId module) CASTOR_REQUIRES(mutex_);
  void prefetch() CASTOR_REQUIRES(mutex_);
  void prefetch_inference() CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool fetch_for_inference(ChunkId chunk, std::uint64_t used_at)
      CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool try_fetch(ChunkId chunk) CASTOR_REQUIRES(mutex_);
  void await_operators(MutexLock& lock) CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool evict_more(std::size_t bytes) CASTOR_REQUIRES(mutex_);
  void reclaim_here(std::size_t bytes) CASTOR_REQUIRES(mutex_);
  /// As ChunkManager's, after slots of others have left.
  bool make_room(std::size_t bytes, std::size_t cap_bytes, std::uint64_t horizon = 0)
      CASTOR_REQUIRES(mutex_);
  /// A promoted chunk of another model, or of this one.
  bool demote_one() CASTOR_REQUIRES(mutex_);
  void give_way(std::size_t bytes) CASTOR_REQUIRES(mutex_);
  void used_by_this_thread() CASTOR_REQUIRES(mutex_);
  /// Whether its chunks may leave for another model of the calling thread's.
  [[nodiscard]] bool yields() const CASTOR_REQUIRES(mutex_);
  template <typename Visit>
  void for_each_other(Visit&& visit) const CASTOR_NOT_ANALYZED {
    for (Runtime* const other : group_->members()) {
      if (other != this) {
        visit(*other);
      }
    }
  }
  void others_give_way(std::size_t bytes) CASTOR_REQUIRES(mutex_);
  void others_end_backward() CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::size_t kept_by_others() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::size_t needed_by_others() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t departures() const CASTOR_REQUIRES(mutex_);
  void announce_homes(const UpcomingModule& upcoming) CASTOR_REQUIRES(mutex_);
  void all_home() CASTOR_REQUIRES(mutex_);
  void begin_use(ModuleId module) CASTOR_REQUIRES(mutex_);
  void end_use(ModuleId module, Pass pass) CASTOR_REQUIRES(mutex_);
  void learn_from_step() CASTOR_REQUIRES(mutex_);
  void plan_from(Trace trace) CASTOR_REQUIRES(mutex_);
  [[nodiscard]] PlanOptions plan_options() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::vector<Placement> placements() const CASTOR_REQUIRES(mutex_);
  void begin_next_step() noexcept CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool on_plan() const noexcept CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool inference_planned() const noexcept CASTOR_REQUIRES(mutex_) {
    return mode_ == PassMode::kInference && inference_.followed();
  }
  static constexpr std::size_t kNoCap = ~std::size_t{0};
  [[nodiscard]] std::size_t slot_cap() const noexcept CASTOR_REQUIRES(mutex_);
  void trim_slots() CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t unplanned_rank() CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::string place_of(EventKind kind, ModuleId module) const;
  [[nodiscard]] std::string place_under_way() const CASTOR_REQUIRES(mutex_);
  [[noreturn]] void throw_out_of_memory(std::size_t bytes, const std::string& where) const
      CASTOR_REQUIRES(mutex_);

  const std::shared_ptr<RuntimeGroup> group_;
  Mutex& mutex_;
  std::condition_variable operators_over_;
  ChunkManager& manager_ CASTOR_GUARDED_BY(mutex_);
  const ChunkLayout& layout_;
  const std::shared_ptr<NonModelMemory> nonmodel_;
  Peaks::Window nonmodel_peaks_ CASTOR_GUARDED_BY(mutex_);   // between moments of a step
  Peaks::Window inference_peaks_ CASTOR_GUARDED_BY(mutex_);  // of a pass
  const RuntimeOptions options_;
  const Clock clock_;

  ModuleFrames frames_ CASTOR_GUARDED_BY(mutex_){
      [this](ModuleId module, Pass pass) CASTOR_REQUIRES(mutex_) { end_use(module, pass); }};
  // Per parameter: entered modules that own it.
  std::vector<std::uint16_t> uses_ CASTOR_GUARDED_BY(mutex_);
  ArrivedGradients gradients_ CASTOR_GUARDED_BY(mutex_);
  // Per chunk: fetched ahead, not used yet.
  std::vector<bool> prefetched_ CASTOR_GUARDED_BY(mutex_);
  const void* thread_ CASTOR_GUARDED_BY(mutex_) = nullptr;  // that runs the model
  std::uint64_t use_counter_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t fixed_device_bytes_ = 0;
  // Of others: at the last moment, the most in this step, and the most that plans know of.
  std::size_t others_now_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t others_peak_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t others_planned_ CASTOR_GUARDED_BY(mutex_) = 0;

  PassMode mode_ CASTOR_GUARDED_BY(mutex_) = PassMode::kInference;
  Tracer tracer_ CASTOR_GUARDED_BY(mutex_);
  TimelineRecorder timeline_ CASTOR_GUARDED_BY(mutex_);
  std::optional<Trace> trace_ CASTOR_GUARDED_BY(mutex_);
  std::optional<Plan> plan_ CASTOR_GUARDED_BY(mutex_);
  std::size_t cursor_ CASTOR_GUARDED_BY(mutex_) = 0;  // accesses of this step so far
  bool diverged_ CASTOR_GUARDED_BY(mutex_) = false;
  bool pressed_ CASTOR_GUARDED_BY(mutex_) = false;  // an allocation of this step did not fit
  std::uint64_t demotions_at_step_start_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::optional<std::uint64_t> last_divergent_ CASTOR_GUARDED_BY(mutex_);  // signature
  // What place() is to decide from.
  std::optional<Trace> placement_trace_ CASTOR_GUARDED_BY(mutex_);
  bool placed_ CASTOR_GUARDED_BY(mutex_) = false;  // since the first plan
  InferencePlan inference_ CASTOR_GUARDED_BY(mutex_){layout_};
  std::vector<ChunkId> ahead_ CASTOR_GUARDED_BY(mutex_);  // of inference: fetched, not used yet
  std::uint64_t evictions_seen_ CASTOR_GUARDED_BY(mutex_) = 0;  // when it last looked ahead
  RuntimeCounts counts_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
