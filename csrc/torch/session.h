#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/run_load.h"
#include "store/passes.h"
#include "store/session_chunks.h"
#include "store/session_memory.h"
#include "store/session_options.h"
#include "store/session_plan.h"
#include "store/session_updates.h"
#include "torch/chunk_storages.h"
#include "torch/gradient_sink.h"
#include "torch/optimizer_state.h"
#include "torch/param_memory.h"
#include "torch/param_storages.h"
#include "torch/state_views.h"
#include "torch/step_events.h"
#include "torch/tensor_gate.h"
#include "torch/torch_device.h"

namespace castor {

/// A boosted model: its parameters live in chunks, its module events drive the runtime, its
/// gradients land in payloads (GradientSink), and an optimizer's rule runs over them (Updater).
/// Connects torch's tensors with what csrc/store keeps of them: memory(), chunks() and updates().
/// The hooks that it installs own it jointly.
///
/// Any thread may run forward, backward, step, saves and loads. Module events, settle and similar
/// calls wait until the pass of another thread is over (PassTurn), without Python's global lock. A
/// step, a save and a load consist of several calls: their caller holds a Turn around them.
/// Allocations may come from any thread at any time.
class Session final : public StepEvents, public std::enable_shared_from_this<Session> {
 public:
  /// Takes over the parameters: afterwards each is a view of its chunk, of `types[i]` or, where
  /// that is nullopt, byte for byte as it was. The layout gets the alignment that the state format
  /// needs.
  ///
  /// - `params`: the model's distinct parameters in execution order, all on the CPU.
  /// - `trained[i]`: whether parameter i gets updates, and memory for them; torch keeps the
  ///   gradients of the others.
  /// - `modules`: module 0 is the model itself.
  /// - `valueless`: parameters that get values by OptimizerState::adopt() later.
  ///
  /// Throws before it touches any parameter if memory is short.
  static std::shared_ptr<Session> create(std::vector<at::Tensor> params,
                                         std::vector<std::string> param_names,
                                         const std::vector<bool>& trained,
                                         const std::vector<std::optional<ScalarType>>& types,
                                         std::vector<ModuleSpec> modules,
                                         const SessionOptions& options,
                                         std::span<const ParamId> valueless);
  ~Session() override;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void enter(ModuleId module) override;
  void exit(ModuleId module) override;
  [[nodiscard]] PassTurn::Origin origin() const noexcept override {
    return passes_->turn().origin();
  }
  void enter_backward(ModuleId module, PassTurn::Origin origin) override;
  void expect_no_backward() override;
  void gradient_arrived(ParamId param, const at::Tensor& incoming) override;
  /// Marks this process as a forked child: what needs memory or threads throws from now on.
  void stay_with_parent();
  [[nodiscard]] GradientSink& gradients() noexcept { return gradients_; }
  [[nodiscard]] const GradientSink& gradients() const noexcept { return gradients_; }

  /// Turn of the calling thread with the model: while it lives, no pass of another thread runs.
  /// Turns nest. The thread that makes a turn destroys it.
  class Turn {
   public:
    /// Waits for the turn. `what`: name of the section in the error of threads that wait for it too
    /// long, "an optimizer.step()". Throws UsageError as PassTurn does, and in a forked child.
    Turn(std::shared_ptr<Session> session, PassTurn::Section kind, const std::string& what);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    const std::shared_ptr<Session> session_;
    const PassTurn::Section kind_;
  };

  // Calls of a step, in this order.
  /// Averages over several ranks the gradients that are not yet the ranks' mean. `optimizer`: which
  /// one steps, of several.
  void reduce_gradients(std::optional<std::size_t> optimizer);
  /// Gives the parameter a gradient of zeros where it has none, of a loss with that scale:
  /// processes that are not among this one's ranks have a gradient of it.
  void make_gradient_present(ParamId param, double scale);
  /// Moves every parameter in a device slot to its host storage, and every gradient into its
  /// payload. Throws as GradientSink does.
  GradientSummary collect_gradients(bool with_norm);
  /// Same as GradientSink::scale, but throws OutOfMemory before any gradient is scaled.
  void scale_gradients(double factor);
  /// Runs one step over the parameters that have a gradient. With Overlap::kForward the step may
  /// still be under way on return: torch's operators wait for what they read, and anything else
  /// calls settle first. If it throws, either nothing has changed or the run counts as broken.
  void update(const GroupOptions& options, double grad_scale) {
    updates_.updater().step(options, grad_scale);
    passes_->turn().step_is_over();
  }
  /// Same as ConsistencyCheck::weights_updated where there are several ranks, else no effect. For
  /// an optimizer whose own step has updated these weights.
  void weights_updated(std::vector<WeightDigest> digests);
  void finish_step();
  /// Same as Updater::arm.
  void arm_updates(GroupOptions options) { updates_.updater().arm(std::move(options)); }
  /// Waits until every rank is about to load; nothing has been changed yet. Throws as
  /// ConsistencyCheck::check_load.
  void barrier_to_load();
  /// Begins the load of a checkpoint: forgets a step that stopped in the middle, and moves the
  /// parameters to their host storage. The run counts as broken until end_load. States on NVMe that
  /// the load replaces, or that were lost, become zeros.
  void begin_load(RunLoad load);
  void end_load(RunLoad load);
  /// Returns whether weights and states are those of one step. Where they are not, a training
  /// forward, step() and settle throw UsageError.
  [[nodiscard]] bool consistent() const { return updates_.consistent(); }
  /// Waits until no update is under way; rethrows the error that stopped one.
  void await_updates() { updates_.updater().wait_for_all(); }
  /// Waits until neither a pass of another thread nor an update is under way. Rethrows the error
  /// that stopped an update, and throws UsageError unless consistent(). For whoever reads the
  /// values.
  void settle();
  /// Waits until no update of the parameter's chunk is under way; rethrows the error that stopped
  /// one.
  void settle(ParamId param);
  /// Moves every parameter in a device slot to its host storage. Parameters may be read and written
  /// freely afterwards, until the next forward. Throws UsageError where backward updated some
  /// chunks and step() never followed.
  void move_to_host();

  /// Same as move_to_host, and from now on a save may read weights and states as they are, on a
  /// thread of its own (reads()). Returns the chunks whose memory somebody can reach whom nothing
  /// holds back: the caller waits until these are read.
  [[nodiscard]] std::vector<ChunkId> begin_reads();
  [[nodiscard]] ChunkReads& reads() noexcept { return updates_.reads(); }

  /// Returns the optimizer states of the parameters. They have no values before zero(). Their
  /// memory may be used after settle(param).
  [[nodiscard]] OptimizerState& optimizer_state() noexcept { return optimizer_state_; }
  [[nodiscard]] const OptimizerState& optimizer_state() const noexcept { return optimizer_state_; }
  /// Returns, where the device computes by itself, a CPU tensor over the parameter's host storage,
  /// borrowed. nullopt: the parameter is resident on the device, or its host storage is not in
  /// memory all the time, or the device is the CPU.
  [[nodiscard]] std::optional<at::Tensor> host_storage(ParamId param);
  /// Prepares reads of single rows of the chunks' parameters in host storage, until the module that
  /// reads them is over. Returns false where the chunks have to come to the device instead: outside
  /// a forward of this thread, in one that prepares a backward, and where parameters have no
  /// permanent storage on the host. Throws as Runtime::begin_rows, and as ParamMemory::take_up.
  [[nodiscard]] bool begin_rows(std::span<const ChunkId> chunks);
  /// Same in a step's forward or backward of this thread; returns false elsewhere.
  [[nodiscard]] bool begin_rows_of_step(std::span<const ChunkId> chunks);
  /// Takes gradients of some rows of a parameter, [rows, ...], within a backward pass of this
  /// thread: adds them to the parameter's gradient, whose other rows are zeros where there was none
  /// (GradientSink::rows_arrived). begin_rows_of_step has returned true for the parameter's chunk
  /// in this step. Throws InvalidArgument for gradients of other rows or another type, and as
  /// gradient_arrived.
  void gradient_rows_arrived(ParamId param, const at::Tensor& rows, const at::Tensor& gradients);
  /// Returns whether somebody has written to the chunk's parameters since the last call for that
  /// chunk. Requires that begin_rows has just returned true for the chunk.
  [[nodiscard]] bool take_written(ChunkId chunk) { return storages_.take_written(chunk); }
  /// Returns the parameter, whose storage follows its chunk.
  [[nodiscard]] const at::Tensor& parameter(ParamId param) const {
    return params_.at(index(param)).local;
  }
  /// Returns what the storage holds: "parameter 'x'", "the gradient of parameter 'x'" or such;
  /// empty where it is none of this session's.
  [[nodiscard]] std::string content_of(const void* storage);
  /// Gives the parameter an address, in memory that stays there, until the returned visit ends.
  /// Returns nullptr where the parameter has an address without a visit.
  [[nodiscard]] std::shared_ptr<void> visit(ParamId param, bool writes);
  /// Same as OptimizerState::views, but returns the same tensors at every call, which the gate
  /// watches.
  [[nodiscard]] const std::vector<at::Tensor>& states(ParamId param);
  /// Same as StateViews::release. Requires that no update is under way.
  void release_states(ParamId param) {
    state_views_.release(param, *gate_, index(layout().place(param).chunk));
  }
  /// Returns the steps that the optimizer states have taken (UpdateRule::steps_states), one float32
  /// per parameter. Torch's `step` entries are views of this tensor.
  [[nodiscard]] const at::Tensor& steps() const noexcept { return steps_; }

  [[nodiscard]] const ChunkLayout& layout() const noexcept override { return memory_.layout(); }
  /// Returns the device of the activations.
  [[nodiscard]] c10::Device torch_device() const { return to_torch(memory_.device().id()); }
  [[nodiscard]] const SessionMemory& memory() const noexcept { return memory_; }
  /// Returns the chunks. Their payloads and placements do not change; all else in the chunk manager
  /// belongs to the runtime.
  [[nodiscard]] const SessionChunks& chunks() const noexcept { return chunks_; }
  [[nodiscard]] SessionUpdates& updates() noexcept { return updates_; }
  [[nodiscard]] const SessionUpdates& updates() const noexcept { return updates_; }
  [[nodiscard]] Runtime& runtime() noexcept { return updates_.runtime(); }

 private:
  /// The session, for functions that may be called while it ends.
  using Self = std::shared_ptr<std::weak_ptr<Session>>;

  Session(std::vector<at::Tensor> params, SessionPlan plan, const Self& self);
  [[nodiscard]] std::shared_ptr<TensorGate> make_gate(const Self& self);
  [[nodiscard]] SessionUpdates::Parts parts_of_updates();
  /// Returns by how many other tensors each parameter's memory is shared.
  [[nodiscard]] std::vector<std::size_t> adopt_parameters(std::span<const ParamId> valueless);
  void watch_tensors(std::span<const std::size_t> others);
  void forbid_absent_addresses();
  void guard_weights();
  void check_requirements() const;
  [[nodiscard]] std::shared_ptr<void> visit_groups(std::span<const TensorGate::Use> uses);
  void keep_apart(std::span<const std::shared_ptr<Payload>> weights) const;
  void note_loaded_rows();
  /// Makes host storage of the chunks' parameters current. Returns false where they have none, or
  /// where another thread's pass is under way.
  [[nodiscard]] bool ready_on_host(std::span<const ChunkId> chunks);
  void check_consistent();     ///< Throws UsageError unless consistent().
  void check_process() const;  ///< Throws UsageError in a forked child.
  /// Returns whether somebody holds another tensor over the chunk's weights or states, which the
  /// gate does not watch.
  [[nodiscard]] bool aliased_values(ChunkId chunk) const;
  void take_over(const Passes::Joined& joined);
  void tell_entered(std::string_view pass, ModuleId module) const;
  void note_updates();
  void settle_group(std::size_t group);
  void await_save(std::size_t group);

  // In this order: later ones use earlier ones, and end before them.
  std::vector<ParamHandle> params_;
  const std::function<void(std::string_view, std::string_view)> entered_;
  const SessionMemory memory_;
  ChunkStorages storages_;
  ParamStorages absent_gradients_;  // on NVMe, or sharded over ranks
  SessionChunks chunks_;
  GradientSink gradients_;
  // Group i: parameters and states of chunk i; GradientSink::group(i): its gradients.
  std::shared_ptr<TensorGate> gate_;
  const at::Tensor steps_;
  SessionUpdates updates_;
  OptimizerState optimizer_state_;
  ParamMemory param_memory_;
  StateViews state_views_;
  const std::shared_ptr<Passes> passes_;
  bool in_child_ = false;
};

}  // namespace castor
