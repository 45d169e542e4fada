#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/run_load.h"
#include "core/runtime.h"
#include "optim/adam.h"
#include "parallel/update_queue.h"
#include "torch/chunk_storages.h"
#include "torch/gradient_copies.h"
#include "torch/optimizer_state.h"
#include "torch/param_gradient.h"
#include "torch/run_integrity.h"
#include "torch/session_device.h"
#include "torch/session_options.h"
#include "torch/state_views.h"
#include "torch/stored_weights.h"
#include "torch/tensor_gate.h"

namespace castor {

/// A boosted model: its parameters live in chunks, its module events drive the runtime, its
/// gradients land in payloads, and Adam runs over them. Owned jointly by the hooks it installs. One
/// thread at a time runs forward, backward and step; allocations may come from any thread.
class Session : public std::enable_shared_from_this<Session> {
 public:
  /// Takes the parameters over: afterwards each is a view of its chunk, in the working precision.
  /// The layout gets the alignment that the state format needs. `params` are the model's distinct
  /// parameters in execution order, all on the CPU, float; module 0 is the model itself.
  /// `trained[i]`: parameter i gets updates, and memory for them; a gradient of others is torch's.
  /// Those of `valueless` get values by adopt() later. Throws before touching any if memory is
  /// short.
  static std::shared_ptr<Session> create(std::vector<at::Tensor> params,
                                         std::vector<std::string> param_names,
                                         const std::vector<bool>& trained,
                                         std::vector<ModuleSpec> modules,
                                         const SessionOptions& options,
                                         std::span<const ParamId> valueless);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Module events.
  void enter(ModuleId module);
  void exit(ModuleId module);
  void enter_backward(ModuleId module);
  void backward_pass_ended(int pass);
  /// No backward will follow the forward that just ended: it failed, or has no result.
  void stop_charging();
  void stay_with_parent();  ///< In a forked child: what needs memory or threads throws from now on.
  /// Follows AccumulateGrad of a parameter, which was given `incoming`: moves a fresh gradient into
  /// the chunk's payload and makes p.grad a view of it.
  void gradient_arrived(ParamId param, const at::Tensor& incoming);
  /// The scale of the loss that the coming backward passes differentiate (fp16), 1 without scaling.
  void set_loss_scale(double scale);

  // The step, in this order.
  /// Brings every parameter home and every gradient into its payload. Throws UsageError for
  /// gradients that were scaled differently, or edited while scaled.
  GradientSummary collect_gradients(bool with_norm);
  /// Multiplies every gradient payload, in place (for optimizers other than Adam).
  void scale_gradients(double factor);
  /// One Adam step over the parameters that have a gradient. `group_of[i]` is parameter i's entry
  /// of `groups`. With Overlap::kForward it may still be under way on return: torch's operators
  /// wait for what they read, anything else calls settle first. If it throws, nothing has moved, or
  /// the run counts as broken.
  void adam_step(std::span<const AdamOptions> groups, std::span<const std::int64_t> group_of,
                 double grad_scale);
  void finish_step();
  /// Overlap::kBackward: the options with which the coming backward updates what it completes; no
  /// effect in other modes. As in adam_step, which has to be given the same.
  void arm_updates(std::vector<AdamOptions> groups, std::vector<std::int64_t> group_of);
  /// A checkpoint comes: forgets a step that stopped in the middle and sends the parameters home.
  /// The run counts as broken until end_load; states on NVMe that it replaces, or lost, are zeros.
  void begin_load(RunLoad load);
  void end_load(RunLoad load);
  /// Whether weights and states are those of one step. Where they are not, a training forward,
  /// step() and settle throw UsageError.
  [[nodiscard]] bool whole() const { return integrity_.whole() && !torn(); }
  /// Returns when no update is under way; rethrows what stopped one.
  void await_updates();
  /// As await_updates; throws UsageError too unless whole(). For whoever reads the values.
  void settle();
  void settle(ParamId param);  ///< of the parameter's chunk
  /// Parameters may be read and written freely afterwards, until the next forward. Throws
  /// UsageError where backward updated some chunks and step() never followed.
  void send_home();

  /// Masters and moments of the parameters. Its moments have no values before zero_moments().
  /// Before its memory is used: settle(param).
  [[nodiscard]] OptimizerState& optimizer_state() const noexcept { return *optimizer_state_; }
  /// On a GPU a CPU tensor over the parameter's home, borrowed; nullopt: its home is on the GPU.
  [[nodiscard]] std::optional<at::Tensor> home(ParamId param);
  /// Parameters and gradients on NVMe; nullptr: all are in memory.
  [[nodiscard]] const StoredWeights* stored_weights() const noexcept { return weights_.get(); }
  /// The parameter has an address, in memory that stays there, until the visit ends.
  [[nodiscard]] std::shared_ptr<void> visit(ParamId param, bool writes);
  /// As OptimizerState's, but the same tensors at every call, and watched by the gate.
  [[nodiscard]] std::vector<at::Tensor> moments(ParamId param);
  [[nodiscard]] std::optional<at::Tensor> moment_scales(ParamId param);
  /// Adam steps taken, one float32 per parameter: views of it are torch's `step` entries.
  [[nodiscard]] const at::Tensor& steps() const noexcept { return steps_; }
  /// Gradient bytes that went from the device to payloads on the host.
  [[nodiscard]] std::uint64_t gradient_bytes_moved() const noexcept {
    return gradient_bytes_moved_;
  }

  [[nodiscard]] const ChunkLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] Runtime& runtime() noexcept { return *runtime_; }
  /// Its payloads and placements do not change; everything else belongs to the runtime.
  [[nodiscard]] const ChunkManager& chunks() const noexcept { return *manager_; }
  [[nodiscard]] const NonModelMemory& nonmodel() const noexcept { return *nonmodel_; }
  [[nodiscard]] MemoryTier& device() noexcept { return *device_; }
  [[nodiscard]] MemoryTier& host() noexcept { return *host_; }

 private:
  Session(std::vector<at::Tensor> params, ChunkLayout layout, std::vector<Placement> placements,
          const SessionOptions& options);
  void add_gradient_payloads();
  void adopt_parameters(std::span<const ParamId> valueless);
  void install_gradient_hooks();
  void follow_backward_pass();
  void check_parameters() const;
  /// Returns what went to the host, and when.
  GradientCopy adopt_gradient(ParamId param, at::Tensor& grad, std::size_t max_uses);
  [[nodiscard]] double gradient_norm() const;
  void watch_tensors();
  void guard_weights();
  [[nodiscard]] std::shared_ptr<void> hold_on_device(std::span<const ChunkId> chunks) const;
  [[nodiscard]] std::shared_ptr<void> visit_groups(std::span<const TensorGate::Use> uses);
  [[nodiscard]] bool stored(ChunkId chunk) const noexcept;
  void begin_gradients_of(ChunkId chunk);
  /// The update that takes parameter i to its next step; changes nothing.
  [[nodiscard]] ParamUpdate next_update(std::size_t i, const AdamOptions& options,
                                        double grad_scale) const;
  void count_steps(std::span<const ParamUpdate> updates);  // which are made, or under way
  void update(std::span<const std::vector<ParamUpdate>> updates);
  void update_now(std::span<const std::vector<ParamUpdate>> updates);
  void submit_update(ChunkId chunk, const std::vector<ParamUpdate>& updates);
  void update_completed_chunks();
  void note_torn_payloads();
  [[nodiscard]] bool torn() const noexcept;  ///< Whether a write to NVMe failed.
  void check_whole();                        ///< Throws UsageError unless whole().
  void check_process() const;                ///< Throws UsageError in a forked child.
  void check_no_update_yet(const std::string& what) const;
  void check_not_updated(ModuleId module) const;
  /// Whether somebody holds another tensor over the chunk's memory, which the gate does not watch.
  [[nodiscard]] bool aliased(ChunkId chunk) const;
  void check_used_gradient(std::size_t i, const AdamOptions& options) const;
  void await_gradients();
  void forget_updates();
  void place_chunks_again();
  void settle_group(std::size_t group);
  [[nodiscard]] std::size_t gradient_group(ChunkId chunk) const noexcept;
  [[nodiscard]] bool updated(ParamId param) const;
  [[nodiscard]] bool trainable(ParamId param) const { return layout_.param(param).trainable; }

  std::vector<at::Tensor> params_;
  const ChunkLayout layout_;
  const Overlap overlap_;
  const bool scaled_precision_;  // fp16: gradients may carry a loss scale
  SessionDevice own_device_;     // where the device computes by itself
  std::shared_ptr<MemoryTier> device_;
  std::shared_ptr<MemoryTier> host_;
  std::shared_ptr<NonModelMemory> nonmodel_;
  const std::shared_ptr<NonModelMemory> charged_;  // for the CPU's allocations; may be nullptr
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<UpdateQueue> updates_;  // nullptr with Overlap::kNone; outlives copies' waits
  std::unique_ptr<CopyEngine> copy_engine_;
  std::unique_ptr<ChunkStorages> storages_;
  std::unique_ptr<StoredWeights> weights_;
  std::unique_ptr<ChunkManager> manager_;
  std::unique_ptr<OptimizerState> optimizer_state_;
  std::unique_ptr<GradientCopies> gradient_copies_;  // nullptr where copies are not asynchronous
  std::unique_ptr<Runtime> runtime_;
  RunIntegrity integrity_;
  std::shared_ptr<TensorGate> gate_;     // groups: chunks; from gradient_group on: their gradients
  std::vector<std::size_t> param_uses_;  // per parameter: of its storage, by castor
  std::vector<std::size_t> gradient_uses_;  // per chunk: of its gradients' storage
  std::unique_ptr<StateViews> state_views_;
  std::shared_ptr<NonModelMemory> account_before_;  // of the thread, while inference runs
  std::vector<int> backward_passes_;  // under way, as autograd numbers them; nested ones last

  std::vector<Gradient> gradients_;
  std::vector<GradFunction> accumulators_;
  at::Tensor steps_;
  // Overlap::kBackward:
  std::vector<AdamOptions> armed_groups_;  // empty: nothing is updated before step()
  std::vector<std::int64_t> armed_group_of_;
  std::vector<ChunkId> completed_;  // gradients complete, update not submitted
  std::vector<bool> updated_;       // per chunk, in this step's backward
  double loss_scale_ = 1.0;
  bool in_child_ = false;
  std::uint64_t gradient_bytes_moved_ = 0;
};

}  // namespace castor
