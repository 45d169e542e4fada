#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_reads.h"
#include "core/run_load.h"
#include "core/runtime.h"
#include "store/chunk_copies.h"
#include "store/gradient_shards.h"
#include "store/rank_host_storage.h"
#include "store/run_integrity.h"
#include "store/session_device.h"
#include "store/session_options.h"
#include "store/session_ranks.h"
#include "store/sharded_host_storage.h"
#include "store/storage_plan.h"
#include "store/stored_weights.h"
#include "store/updater.h"
#include "torch/chunk_storages.h"
#include "torch/gradient_sink.h"
#include "torch/gradient_storages.h"
#include "torch/optimizer_state.h"
#include "torch/param_memory.h"
#include "torch/passes.h"
#include "torch/state_views.h"
#include "torch/step_events.h"
#include "torch/tensor_gate.h"
#include "torch/torch_device.h"

namespace castor {

/// A boosted model: its parameters live in chunks, its module events drive the runtime, its
/// gradients land in payloads (GradientSink), and an optimizer's rule runs over them (Updater).
/// Owns these parts and connects them. The hooks that it installs own it jointly.
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
  /// Same as GradientSink::set_loss_scale.
  void set_loss_scale(double scale) { gradients_->set_loss_scale(scale); }

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

  /// Sets whether the gradients of the following passes become the ranks' mean at the end of each
  /// pass, or all at the next step. Returns the previous setting; true where this process is alone.
  bool synchronise(bool on);
  /// Returns the communication with the other ranks; nullptr where this process is alone.
  [[nodiscard]] SessionRanks* ranks() const noexcept { return ranks_.get(); }
  [[nodiscard]] const RankHostStorage& rank_host_storage() const noexcept {
    return rank_host_storage_;
  }
  [[nodiscard]] const ShardedHostStorage& sharded_host_storage() const noexcept {
    return sharded_host_storage_;
  }
  /// Returns the sharded gradients; nullptr where no gradients are sharded.
  [[nodiscard]] const GradientShards* gradient_shards() const noexcept {
    return gradient_shards_.get();
  }
  /// Returns the stage of ZeRO by which the ranks keep weights; 0 where this process is alone.
  [[nodiscard]] std::size_t zero_stage() const noexcept;

  // Calls of a step, in this order.
  /// Averages over several ranks the gradients that are not yet the ranks' mean. `optimizer`: which
  /// one steps, of several.
  void reduce_gradients(std::optional<std::size_t> optimizer);
  /// Returns which gradients this rank has.
  [[nodiscard]] GradientMarks gradient_marks() const { return gradients_->marks(); }
  /// Gives the parameter a gradient of zeros where it has none, of a loss with that scale:
  /// processes that are not among ranks() have a gradient of it.
  void make_gradient_present(ParamId param, double scale);
  /// Moves every parameter in a device slot to its host storage, and every gradient into its
  /// payload. Throws as GradientSink does.
  GradientSummary collect_gradients(bool with_norm);
  /// Same as GradientSink::scale, but throws OutOfMemory before any gradient is scaled.
  void scale_gradients(double factor);
  /// Same as GradientSink::refuse_edits.
  void refuse_gradient_edits() { gradients_->refuse_edits(); }
  /// Runs one step over the parameters that have a gradient. With Overlap::kForward the step may
  /// still be under way on return: torch's operators wait for what they read, and anything else
  /// calls settle first. If it throws, either nothing has changed or the run counts as broken.
  void update(const GroupOptions& options, double grad_scale) {
    updater_->step(options, grad_scale);
    passes_->turn().step_is_over();
  }
  /// Same as RankMeeting::weights_updated where there are several ranks, else no effect. For an
  /// optimizer whose own step has updated these weights.
  void weights_updated(std::vector<WeightDigest> digests);
  void finish_step();
  /// Same as Updater::arm.
  void arm_updates(GroupOptions options) { updater_->arm(std::move(options)); }
  /// Waits until every rank is about to load; nothing has been changed yet. Throws as
  /// RankMeeting::meet_to_load.
  void meet_to_load();
  /// Begins the load of a checkpoint: forgets a step that stopped in the middle, and moves the
  /// parameters to their host storage. The run counts as broken until end_load. States on NVMe that
  /// the load replaces, or that were lost, become zeros.
  void begin_load(RunLoad load);
  void end_load(RunLoad load);
  /// Lets each rank read again what others keep. Every rank calls it once it has replaced its
  /// weights.
  void share_weights();
  /// Returns whether weights and states are those of one step. Where they are not, a training
  /// forward, step() and settle throw UsageError.
  [[nodiscard]] bool consistent() const { return integrity_.consistent() && !torn(); }
  /// Waits until no update is under way; rethrows the error that stopped one.
  void await_updates() { updater_->wait_for_all(); }
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
  [[nodiscard]] ChunkReads& reads() noexcept { return reads_; }
  /// Returns the copies of chunks that a save reads, after begin_reads.
  [[nodiscard]] ChunkCopies& chunk_copies() noexcept { return *chunk_copies_; }

  /// Same as ChunkUpdates::rule.
  [[nodiscard]] const UpdateRule& rule() const { return chunk_updates_->rule(); }
  /// Same as ChunkUpdates::set_rounding.
  void set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams) {
    chunk_updates_->set_rounding(seed, std::move(streams));
  }
  /// Returns the optimizer states of the parameters. They have no values before zero(). Their
  /// memory may be used after settle(param).
  [[nodiscard]] OptimizerState& optimizer_state() const noexcept { return *optimizer_state_; }
  /// Returns, where the device computes by itself, a CPU tensor over the parameter's host storage,
  /// borrowed. nullopt: the parameter is resident on the device, or its host storage is not in
  /// memory all the time, or the device is the CPU.
  [[nodiscard]] std::optional<at::Tensor> host_storage(ParamId param);
  /// Returns the NVMe tier, with contents as StoragePlan numbers them; nullptr where all is in
  /// memory.
  [[nodiscard]] const NvmeTier* nvme() const noexcept { return nvme_.get(); }
  /// Returns the stream over the num_activation_pages() pages that activations may take on NVMe;
  /// nullptr where there are none.
  [[nodiscard]] ChunkStream* activation_stream() const noexcept;
  [[nodiscard]] std::size_t num_activation_pages() const noexcept {
    return places_.nvme[StoragePlan::kActivations].chunks.size();
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
    state_views_->release(param, *gate_, index(layout_.place(param).chunk));
  }
  /// Returns the steps that the optimizer states have taken (UpdateRule::steps_states), one float32
  /// per parameter. Torch's `step` entries are views of this tensor.
  [[nodiscard]] const at::Tensor& steps() const noexcept { return steps_; }
  [[nodiscard]] std::uint64_t gradient_bytes_moved() const noexcept {
    return gradients_->bytes_moved();
  }

  [[nodiscard]] const ChunkLayout& layout() const noexcept override { return layout_; }
  [[nodiscard]] Runtime& runtime() noexcept { return *runtime_; }
  /// Returns the chunk manager. Its payloads and placements do not change; all else in it belongs
  /// to the runtime.
  [[nodiscard]] const ChunkManager& chunks() const noexcept { return *manager_; }
  [[nodiscard]] NonModelMemory& nonmodel() const noexcept { return *nonmodel_; }
  [[nodiscard]] CopyEngine& copies() const noexcept { return *copy_engine_; }
  /// Returns the device of the activations.
  [[nodiscard]] c10::Device torch_device() const { return to_torch(own_device_.id()); }
  /// Same as SessionDevice::current_stream.
  [[nodiscard]] StreamId current_stream() const { return own_device_.current_stream(); }
  [[nodiscard]] MemoryTier& device() noexcept { return *device_; }
  /// Returns the device bytes of this model's chunks, activations and temporaries. On a GPU the
  /// activations and temporaries are those of all models.
  [[nodiscard]] std::size_t device_bytes() const noexcept;
  [[nodiscard]] MemoryTier& host() noexcept { return *host_; }

 private:
  Session(std::vector<at::Tensor> params, ChunkLayout layout, std::vector<Placement> placements,
          const SessionOptions& options);
  /// Returns by how many other tensors each parameter's memory is shared.
  [[nodiscard]] std::vector<std::size_t> adopt_parameters(std::span<const ParamId> valueless);
  void watch_tensors(Overlap overlap, std::span<const std::size_t> others);
  void forbid_absent_addresses();
  void guard_weights();
  void check_requirements() const;
  [[nodiscard]] std::shared_ptr<void> visit_groups(std::span<const TensorGate::Use> uses);
  [[nodiscard]] bool stored(ChunkId chunk) const noexcept;
  [[nodiscard]] bool sharded_gradients(ChunkId chunk) const noexcept;
  void end_reads_of_shards();
  void note_torn_payloads();
  [[nodiscard]] bool torn() const noexcept;  ///< Whether a write to NVMe failed.
  [[nodiscard]] std::unique_ptr<StoredWeights> make_weights();
  void check_consistent();     ///< Throws UsageError unless consistent().
  void check_ranks() const;    ///< Throws UsageError for what several ranks cannot do.
  void check_process() const;  ///< Throws UsageError in a forked child.
  /// Returns whether somebody holds another tensor over the chunk's memory, which the gate does not
  /// watch.
  [[nodiscard]] bool aliased(ChunkId chunk) const {
    return gradients_->aliased(chunk) || aliased_values(chunk);
  }
  [[nodiscard]] bool aliased_values(ChunkId chunk) const;  ///< The same, without gradients.
  void place_chunks_again();
  void take_over(const Passes::Joined& joined);
  void note_updates();
  void settle_group(std::size_t group);
  [[nodiscard]] bool read_by_save(std::size_t group) const;
  void await_save(std::size_t group);

  std::vector<ParamHandle> params_;
  const ChunkLayout layout_;
  const ShardMap shards_;
  SessionDevice own_device_;
  const std::shared_ptr<SharedBudgets> budgets_;
  const SharedBudgets::Place budget_place_;
  std::shared_ptr<MemoryTier> device_;
  std::shared_ptr<MemoryTier> host_;
  const std::shared_ptr<Ledger> nvme_ledger_;  // nullptr: there is no such tier
  Reservation nvme_taken_;
  std::shared_ptr<NonModelMemory> nonmodel_;
  RankHostStorage rank_host_storage_;
  std::unique_ptr<Executor> executor_;
  ShardedHostStorage sharded_host_storage_;
  const StoragePlan places_;
  std::unique_ptr<NvmeTier> nvme_;  // nullptr: nothing is there; outlives who borrows its streams
  std::unique_ptr<UpdateQueue>
      update_queue_;  // nullptr with Overlap::kNone; outlives copies' waits
  std::unique_ptr<CopyEngine> copy_engine_;
  std::unique_ptr<ChunkStorages> storages_;
  GradientStorages absent_gradients_;                // on NVMe, or sharded over ranks
  std::unique_ptr<GradientShards> gradient_shards_;  // nullptr: gradients are full, or shared
  std::unique_ptr<StoredWeights> weights_;
  std::unique_ptr<ChunkManager> manager_;
  std::unique_ptr<GradientSink> gradients_;
  std::unique_ptr<StateStore> state_store_;
  std::unique_ptr<ChunkCopies> chunk_copies_;
  std::unique_ptr<SessionRanks> ranks_;  // nullptr: one process
  std::unique_ptr<OptimizerState> optimizer_state_;
  std::unique_ptr<ParamMemory> param_memory_;
  std::unique_ptr<ChunkUpdates> chunk_updates_;
  std::unique_ptr<Runtime> runtime_;
  std::shared_ptr<Passes> passes_;
  RunIntegrity integrity_;
  ChunkReads reads_;
  // Group i: parameters and states of chunk i; GradientSink::group(i): its gradients.
  std::shared_ptr<TensorGate> gate_;
  at::Tensor steps_;
  std::unique_ptr<Updater> updater_;
  std::unique_ptr<StateViews> state_views_;
  bool in_child_ = false;
};

}  // namespace castor
