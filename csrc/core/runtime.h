#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
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
#include "core/spare_memory.h"
#include "core/timeline.h"
#include "core/trace.h"

namespace castor {

/// Kind of a forward: one that prepares a backward (and is traced), or one that only computes.
enum class PassMode : std::uint8_t { kTraining, kInference };

/// Copy of a gradient to its payload: bytes that went from the device to the host, and when, by the
/// runtime's clock. Nothing was copied where bytes are 0.
struct GradientCopy {
  std::uint64_t bytes = 0;
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
};

/// Counters since construction, and the chunks that are promoted now.
struct RuntimeCounts {
  std::uint64_t steps = 0;
  std::uint64_t demand_fetches = 0;
  std::uint64_t prefetch_hits = 0;
  std::uint64_t pressure_evictions = 0;  ///< by an allocation that did not fit
  std::uint64_t divergent_steps = 0;
  std::uint64_t plans = 0;
  std::uint64_t resident_chunks = 0;  ///< now: fully on the device by promotion
  std::uint64_t resident_bytes = 0;   ///< device bytes that they take
};

/// Runtime of one model: follows a training step event by event and keeps on the device what the
/// step needs. It traces the first step, plans from the trace, then runs the plan. A step that
/// leaves the plan runs on demand, is counted, and becomes the plan when it repeats. Inference has
/// a plan of its own, made of its last round (InferencePlan); neither plan changes the other.
///
/// The runtimes of a group share the device budget (docs/design/0038). Where one needs room, chunks
/// of the others leave first, and its plans leave room for the bytes of the others that stay.
///
/// Thread-safe: one mutex, the group's, taken by every member function after NonModelMemory's.
/// Callers must not allocate non-model memory while inside. One C++ call per module event, O(own
/// parameters + log chunks).
class Runtime final : public Reclaimer {
 public:
  using Clock = TimelineRecorder::Clock;

  /// Throws OutOfMemory naming the module whose chunks alone exceed the device budget, and
  /// InvalidArgument for options out of range. `group` has the runtimes that take from the same
  /// device budget; nullptr: this one is alone. `device_clock`: nullptr where the device's work is
  /// done when the host has called it.
  Runtime(ChunkManager& manager, std::shared_ptr<NonModelMemory> nonmodel, RuntimeOptions options,
          Clock clock, std::shared_ptr<RuntimeGroup> group = nullptr,
          std::unique_ptr<DeviceClock> device_clock = nullptr);
  ~Runtime() override;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// Enters a module before its forward: its chunks are resident, pinned and bound on return.
  /// `mode` counts at the outermost module. Module 0 is the model: entering it releases the modules
  /// that an interrupted pass left entered. Throws OutOfMemory.
  void enter(ModuleId module, PassMode mode);
  /// Exits a module after its forward, or when the forward failed: releases it and the modules
  /// within it that are still entered.
  void exit(ModuleId module);
  /// Enters a module's backward, at the first gradient of its outputs. Releases the module entered
  /// before it in backward.
  void enter_backward(ModuleId module);
  /// Notes that a parameter's gradient is complete in its chunk's payload, or on its way there.
  /// Returns whether all gradients of the chunk are now.
  bool grad_ready(ParamId param, const GradientCopy& copy = {});
  /// Pins the chunk for an operator of `stream` if the payload that it uses, parameters or
  /// gradients, is in device memory now. Given back by unpin on the same thread.
  [[nodiscard]] std::optional<Pin> pin_for_operator(ChunkId chunk, StreamId stream = {},
                                                    PayloadKind used = PayloadKind::kParam);
  void unpin(std::vector<Pin>& pins) noexcept;
  /// Same as ChunkManager::take_copy, and drop_copy.
  void take_copy(ChunkId chunk);
  void drop_copy(ChunkId chunk);
  /// Makes `spare` give way from now on, where this model or another one of the group needs room;
  /// nullptr: there is none. Borrowed.
  void set_spare(SpareMemory* spare);
  /// Prepares reads of single rows of `chunks` on the host, in the forward under way. Chunks that
  /// are read by the row leave their slots, if no module has them pinned. Returns false, and
  /// changes nothing, where the forward prepares a backward or there is none, and where one of
  /// `chunks` is resident for good or pinned. Rethrows a failure of a copy back.
  [[nodiscard]] bool begin_rows(std::span<const ChunkId> chunks);
  /// Same for a step's forward or backward under way: only `chunks` leave their slots, since the
  /// plan may want others there. Returns false where no step is under way, and without a plan: the
  /// first plan decides which chunks the device has room for.
  [[nodiscard]] bool begin_rows_of_step(std::span<const ChunkId> chunks);
  /// Notes that steps will read rows of `chunks`. Plans fetch ahead no chunk whose rows a step has
  /// read, or will read, until a module's own access brings the chunk in.
  void expect_rows_of_step(std::span<const ChunkId> chunks);
  /// Returns the device bytes of this model that are never given back between passes: chunks whose
  /// placement is the device, and resident ones.
  [[nodiscard]] std::size_t lasting_bytes() const;
  /// Sends a chunk whose gradients are complete to its host storage, with user writes, so that it
  /// can be updated while backward goes on. Returns false, and changes nothing, while the chunk is
  /// pinned.
  [[nodiscard]] bool retire(ChunkId chunk);
  /// Ends forward and backward: every chunk goes to its host storage, with user writes. Parameters
  /// may be read and written freely until the next enter. Idempotent.
  void move_to_host();
  /// Same as move_to_host, but at the beginning of the optimizer's update, which the timeline
  /// notes.
  void begin_update();
  /// Ends the step after the optimizer updated the host copies: closes the trace and plans.
  void finish_step();
  /// Returns whether place() has something to decide: the first step by plan is over, or the plan
  /// changed.
  [[nodiscard]] bool placement_due() const;
  /// Promotes, between steps, the `candidates` (one entry per chunk) that choose_promotions picks,
  /// and plans again where that changes anything. Chunks that were promoted and are not picked
  /// again are demoted. Promoted chunks give way by themselves when memory is needed later.
  /// Waits for operators of other threads. Requires that no update is pending and no gradient is on
  /// its way. Rethrows a copy's failure; chunks that moved before it stay there.
  void place(const std::vector<bool>& candidates);

  /// Makes everything leave that may, of all models in the group, before another model joins it.
  static void make_way(RuntimeGroup& group);
  /// Returns the device bytes of the other models that stay while this one works: resident chunks,
  /// activations, chunks in use.
  [[nodiscard]] std::size_t bytes_of_others() const;

  void reclaim(std::size_t bytes) override;
  [[nodiscard]] bool evict_refused(std::size_t bytes) override;

  /// Plans from a trace recorded earlier, so that no warm-up step is needed. Throws UsageError in
  /// the middle of a step and InvalidArgument for another model's trace; nothing has changed then.
  void load_trace(Trace trace);
  [[nodiscard]] std::optional<Trace> trace() const;
  [[nodiscard]] std::optional<Prediction> prediction() const;
  [[nodiscard]] RuntimeCounts counts() const;
  /// Returns the number of events of the step under way so far.
  [[nodiscard]] std::size_t num_events() const;
  /// Returns the timeline of the last finished training step; it has no events before there is one.
  /// Its device times are there if the step was timed and the device has come to its end. Throws
  /// Error where the device has failed.
  [[nodiscard]] Timeline timeline();
  /// Times the next step by the device's clock, as steps are that run without a plan. Returns
  /// whether there is such a clock.
  bool time_next_step();
  /// Returns whether the last step was timed and timeline() has not seen its device times yet.
  [[nodiscard]] bool device_times_pending() const;
  [[nodiscard]] std::size_t step_peak_device_bytes() const;
  [[nodiscard]] TransferCounts transfers() const;
  [[nodiscard]] std::uint64_t clock_ns() const { return clock_(); }
  /// Returns whether no module is entered.
  [[nodiscard]] bool idle() const noexcept { return idle_.load(std::memory_order_acquire); }

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
  /// Same as ChunkManager::make_room, but slots of other models leave first.
  bool make_room(std::size_t bytes, std::size_t cap_bytes, std::uint64_t horizon = 0)
      CASTOR_REQUIRES(mutex_);
  /// Demotes a promoted chunk of another model, or of this one. Returns false when there is none.
  bool demote_one() CASTOR_REQUIRES(mutex_);
  void give_way(std::size_t bytes) CASTOR_REQUIRES(mutex_);
  void used_by_this_thread() CASTOR_REQUIRES(mutex_);
  /// Returns whether this model's chunks may leave for another model of the calling thread.
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
  bool spare_gives_way(std::size_t bytes) CASTOR_REQUIRES(mutex_);
  void others_end_backward() CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::size_t kept_by_others() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::size_t needed_by_others() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t departures() const CASTOR_REQUIRES(mutex_);
  void announce_params(const UpcomingModule& upcoming) CASTOR_REQUIRES(mutex_);
  void all_to_host() CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool may_leave(std::span<const ChunkId> chunks) const CASTOR_REQUIRES(mutex_);
  void leave_slot(ChunkId chunk) CASTOR_REQUIRES(mutex_);
  /// Brings idle() up to date.
  void note_frames() noexcept CASTOR_REQUIRES(mutex_) {
    idle_.store(frames_.no_forward(), std::memory_order_release);
  }
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
  Peaks::Window nonmodel_peaks_ CASTOR_GUARDED_BY(mutex_);   // between events of a step
  Peaks::Window inference_peaks_ CASTOR_GUARDED_BY(mutex_);  // of a pass
  const RuntimeOptions options_;
  const Clock clock_;

  ModuleFrames frames_ CASTOR_GUARDED_BY(mutex_){
      [this](ModuleId module, Pass pass) CASTOR_REQUIRES(mutex_) { end_use(module, pass); }};
  // Written under the mutex. Release and acquire: who sees the last module left sees what it did.
  std::atomic<bool> idle_{true};
  // Per parameter: entered modules that own it.
  std::vector<std::uint16_t> uses_ CASTOR_GUARDED_BY(mutex_);
  ArrivedGradients gradients_ CASTOR_GUARDED_BY(mutex_);
  // Per chunk: fetched ahead, not used yet.
  std::vector<bool> prefetched_ CASTOR_GUARDED_BY(mutex_);
  // Per chunk: steps read rows of it, and not the chunk.
  std::vector<bool> read_by_row_ CASTOR_GUARDED_BY(mutex_);
  SpareMemory* spare_ CASTOR_GUARDED_BY(mutex_) = nullptr;
  const void* thread_ CASTOR_GUARDED_BY(mutex_) = nullptr;  // that runs the model
  std::uint64_t use_counter_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t fixed_device_bytes_ = 0;
  // Bytes that others keep: at the last event, the most in this step, the most that plans know of.
  std::size_t others_now_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t others_peak_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t others_planned_ CASTOR_GUARDED_BY(mutex_) = 0;

  PassMode mode_ CASTOR_GUARDED_BY(mutex_) = PassMode::kInference;
  Tracer tracer_ CASTOR_GUARDED_BY(mutex_);
  TimelineRecorder timeline_ CASTOR_GUARDED_BY(mutex_);
  StepClock step_clock_ CASTOR_GUARDED_BY(mutex_);
  bool time_next_step_ CASTOR_GUARDED_BY(mutex_) = false;
  std::optional<Trace> trace_ CASTOR_GUARDED_BY(mutex_);
  std::optional<Plan> plan_ CASTOR_GUARDED_BY(mutex_);
  std::size_t cursor_ CASTOR_GUARDED_BY(mutex_) = 0;  // accesses of this step so far
  bool diverged_ CASTOR_GUARDED_BY(mutex_) = false;
  bool pressed_ CASTOR_GUARDED_BY(mutex_) = false;  // an allocation of this step did not fit
  std::uint64_t demotions_at_step_start_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::optional<std::uint64_t> last_divergent_ CASTOR_GUARDED_BY(mutex_);  // signature
  // The trace that place() is to decide from.
  std::optional<Trace> placement_trace_ CASTOR_GUARDED_BY(mutex_);
  bool placed_ CASTOR_GUARDED_BY(mutex_) = false;  // since the first plan
  InferencePlan inference_ CASTOR_GUARDED_BY(mutex_){layout_};
  std::vector<ChunkId> ahead_ CASTOR_GUARDED_BY(mutex_);  // of inference: fetched, not used yet
  std::uint64_t evictions_seen_ CASTOR_GUARDED_BY(mutex_) = 0;  // when inference last looked ahead
  RuntimeCounts counts_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
