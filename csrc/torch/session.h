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
#include "torch/chunk_copies.h"
#include "torch/chunk_storages.h"
#include "torch/cut_homes.h"
#include "torch/gradient_parts.h"
#include "torch/gradient_sink.h"
#include "torch/host_places.h"
#include "torch/optimizer_state.h"
#include "torch/param_memory.h"
#include "torch/passes.h"
#include "torch/rank_homes.h"
#include "torch/run_integrity.h"
#include "torch/session_device.h"
#include "torch/session_options.h"
#include "torch/session_ranks.h"
#include "torch/state_views.h"
#include "torch/step_events.h"
#include "torch/stored_weights.h"
#include "torch/tensor_gate.h"
#include "torch/updater.h"

namespace castor {

/// A boosted model: its parameters live in chunks, its module events drive the runtime, its
/// gradients land in payloads (GradientSink), and an optimizer's rule runs over them (Updater).
/// Owns these and brings them together. Owned jointly by the hooks it installs.
///
/// Any thread may run forward, backward, step, saves and loads: module events, settle and the like
/// wait until the pass of another thread is over (PassTurn), without Python's global lock. A step,
/// a save and a load are made of several calls: their caller holds a Turn around them. Allocations
/// may come from any thread at any time.
class Session final : public StepEvents, public std::enable_shared_from_this<Session> {
 public:
  /// Takes the parameters over: afterwards each is a view of its chunk, of `types[i]` or, where
  /// that is nullopt, byte for byte as it was. The layout gets the alignment that the state format
  /// needs. `params` are the model's distinct parameters in execution order, all on the CPU; module
  /// 0 is the model itself. `trained[i]`: parameter i gets updates, and memory for them; a gradient
  /// of others is torch's. Those of `valueless` get values by adopt() later. Throws before touching
  /// any if memory is short.
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
  void stay_with_parent();  ///< In a forked child: what needs memory or threads throws from now on.
  /// As GradientSink's.
  void set_loss_scale(double scale) { gradients_->set_loss_scale(scale); }

  /// The calling thread's turn with the model while it lives: no pass of another thread's runs.
  /// Turns nest. Made and destroyed by one thread.
  class Turn {
   public:
    /// `what`: "an optimizer.step()", for those who wait too long. Throws UsageError as PassTurn
    /// does, and in a forked child.
    Turn(std::shared_ptr<Session> session, PassTurn::Section kind, const std::string& what);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    const std::shared_ptr<Session> session_;
    const PassTurn::Section kind_;
  };

  /// With several ranks: whether the gradients of the passes that follow become their mean at the
  /// end of each, or all at the next step. Returns whether those before did.
  bool synchronise(bool on);
  /// nullptr: this process is alone.
  [[nodiscard]] SessionRanks* ranks() const noexcept { return ranks_.get(); }
  [[nodiscard]] const RankHomes& rank_homes() const noexcept { return rank_homes_; }
  [[nodiscard]] const CutHomes& cut_homes() const noexcept { return cut_homes_; }
  /// nullptr: no gradients are in parts.
  [[nodiscard]] const GradientParts* gradient_parts() const noexcept {
    return gradient_parts_.get();
  }
  /// The stage of ZeRO that weights are kept by; 0: this process is alone.
  [[nodiscard]] std::size_t zero_stage() const noexcept;

  // The step, in this order.
  /// With several ranks: gradients that are not their mean yet become it. `optimizer`: which steps,
  /// of several.
  void bring_together(std::optional<std::size_t> optimizer);
  /// What there is of them.
  [[nodiscard]] GradientMarks gradient_marks() const { return gradients_->marks(); }
  /// Zeros where the parameter has no gradient, of a loss with that scale: others have one, who
  /// are none of ranks().
  void make_gradient_present(ParamId param, double scale);
  /// Brings every parameter home and every gradient into its payload. Throws as GradientSink does.
  GradientSummary collect_gradients(bool with_norm);
  /// As GradientSink's. Throws OutOfMemory before any is scaled.
  void scale_gradients(double factor);
  /// As GradientSink's.
  void refuse_gradient_edits() { gradients_->refuse_edits(); }
  /// One step over the parameters that have a gradient. With Overlap::kForward it may still be
  /// under way on return: torch's operators wait for what they read, anything else calls settle
  /// first. If it throws, nothing has moved, or the run counts as broken.
  void update(const GroupOptions& options, double grad_scale) {
    updater_->step(options, grad_scale);
    passes_->turn().step_is_over();
  }
  /// An optimizer's own step has updated these: as RankMeeting's, where there are several ranks.
  void weights_updated(std::vector<WeightDigest> digests);
  void finish_step();
  /// As Updater's.
  void arm_updates(GroupOptions options) { updater_->arm(std::move(options)); }
  /// Every rank is about to load; nothing has been changed. Throws as RankMeeting::meet_to_load.
  void meet_to_load();
  /// A checkpoint comes: forgets a step that stopped in the middle and sends the parameters home.
  /// The run counts as broken until end_load; states on NVMe that it replaces, or lost, are zeros.
  void begin_load(RunLoad load);
  void end_load(RunLoad load);
  /// Every rank has replaced weights, and calls it: from now on each may read what others keep.
  void share_homes();
  /// Whether weights and states are those of one step. Where they are not, a training forward,
  /// step() and settle throw UsageError.
  [[nodiscard]] bool whole() const { return integrity_.whole() && !torn(); }
  /// Returns when no update is under way; rethrows what stopped one.
  void await_updates() { updater_->wait_for_all(); }
  /// Returns when neither a pass of another thread nor an update is under way; rethrows what
  /// stopped one, and throws UsageError unless whole(). For whoever reads the values.
  void settle();
  void settle(ParamId param);  ///< of the parameter's chunk
  /// Parameters may be read and written freely afterwards, until the next forward. Throws
  /// UsageError where backward updated some chunks and step() never followed.
  void send_home();

  /// As send_home, and from now on a save may read weights and states as they are, on a thread of
  /// its own (reads()). Returns the chunks of which memory is known to somebody whom nothing holds
  /// back: wait for them.
  [[nodiscard]] std::vector<ChunkId> begin_reads();
  [[nodiscard]] ChunkReads& reads() noexcept { return reads_; }
  /// Behind begin_reads.
  [[nodiscard]] ChunkCopies& chunk_copies() noexcept { return *chunk_copies_; }

  /// As ChunkUpdates'.
  [[nodiscard]] const UpdateRule& rule() const { return chunk_updates_->rule(); }
  /// As ChunkUpdates'.
  void set_rounding(std::uint64_t seed, std::vector<std::uint64_t> streams) {
    chunk_updates_->set_rounding(seed, std::move(streams));
  }
  /// What the rule keeps of the parameters. It has no values before zero(). Before its memory is
  /// used: settle(param).
  [[nodiscard]] OptimizerState& optimizer_state() const noexcept { return *optimizer_state_; }
  /// On a GPU a CPU tensor over the parameter's home, borrowed; nullopt: its home is on the GPU.
  [[nodiscard]] std::optional<at::Tensor> home(ParamId param);
  /// By HostPlaces; nullptr: all is in memory.
  [[nodiscard]] const NvmeTier* nvme() const noexcept { return nvme_.get(); }
  /// Of the pages that activations may take there, in that number; nullptr: there are none.
  [[nodiscard]] ChunkStream* activation_stream() const noexcept;
  [[nodiscard]] std::size_t num_activation_pages() const noexcept {
    return places_.nvme[HostPlaces::kActivations].chunks.size();
  }
  /// "parameter 'x'", "the gradient of parameter 'x'" or such, where that is the storage's; else
  /// empty.
  [[nodiscard]] std::string content_of(const void* storage);
  /// The parameter has an address, in memory that stays there, until the visit ends.
  [[nodiscard]] std::shared_ptr<void> visit(ParamId param, bool writes);
  /// As OptimizerState::views, but the same tensors at every call, and watched by the gate.
  [[nodiscard]] const std::vector<at::Tensor>& states(ParamId param);
  /// See StateViews::release. No update is under way.
  void release_states(ParamId param) {
    state_views_->release(param, *gate_, index(layout_.place(param).chunk));
  }
  /// As Updater's.
  [[nodiscard]] const at::Tensor& steps() const noexcept { return updater_->steps(); }
  [[nodiscard]] std::uint64_t gradient_bytes_moved() const noexcept {
    return gradients_->bytes_moved();
  }

  [[nodiscard]] const ChunkLayout& layout() const noexcept override { return layout_; }
  [[nodiscard]] Runtime& runtime() noexcept { return *runtime_; }
  /// Its payloads and placements do not change; everything else belongs to the runtime.
  [[nodiscard]] const ChunkManager& chunks() const noexcept { return *manager_; }
  [[nodiscard]] NonModelMemory& nonmodel() const noexcept { return *nonmodel_; }
  [[nodiscard]] CopyEngine& copies() const noexcept { return *copy_engine_; }
  /// Where activations are.
  [[nodiscard]] c10::Device torch_device() const { return own_device_.torch_device(); }
  /// As SessionDevice's.
  [[nodiscard]] StreamId current_stream() const { return own_device_.current_stream(); }
  [[nodiscard]] MemoryTier& device() noexcept { return *device_; }
  /// Of this model's chunks and of activations and temporaries; on a GPU those of all models.
  [[nodiscard]] std::size_t device_bytes() const noexcept;
  [[nodiscard]] MemoryTier& host() noexcept { return *host_; }

 private:
  Session(std::vector<at::Tensor> params, ChunkLayout layout, std::vector<Placement> placements,
          const SessionOptions& options);
  /// Returns by how many other tensors each parameter's memory is shared.
  [[nodiscard]] std::vector<std::size_t> adopt_parameters(std::span<const ParamId> valueless);
  void watch_tensors(Overlap overlap, std::span<const std::size_t> others);
  void guard_weights();
  void check_requirements() const;
  [[nodiscard]] std::shared_ptr<void> visit_groups(std::span<const TensorGate::Use> uses);
  [[nodiscard]] bool stored(ChunkId chunk) const noexcept;
  [[nodiscard]] bool cut_gradients(ChunkId chunk) const noexcept;
  void end_reads_of_parts();
  void note_torn_payloads();
  [[nodiscard]] bool torn() const noexcept;  ///< Whether a write to NVMe failed.
  [[nodiscard]] std::unique_ptr<StoredWeights> make_weights();
  void check_whole();          ///< Throws UsageError unless whole().
  void check_ranks() const;    ///< Throws UsageError for what several do not have.
  void check_process() const;  ///< Throws UsageError in a forked child.
  /// Whether somebody holds another tensor over the chunk's memory, which the gate does not watch.
  [[nodiscard]] bool aliased(ChunkId chunk) const {
    return gradients_->aliased(chunk) || aliased_values(chunk);
  }
  [[nodiscard]] bool aliased_values(ChunkId chunk) const;  ///< weights or states
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
  RankHomes rank_homes_;
  std::unique_ptr<Executor> executor_;
  CutHomes cut_homes_;
  std::unique_ptr<GradientParts> gradient_parts_;  // nullptr: gradients are whole, or common
  const HostPlaces places_;
  std::unique_ptr<NvmeTier> nvme_;  // nullptr: nothing is there; outlives who borrows its streams
  std::unique_ptr<UpdateQueue>
      update_queue_;  // nullptr with Overlap::kNone; outlives copies' waits
  std::unique_ptr<CopyEngine> copy_engine_;
  std::unique_ptr<ChunkStorages> storages_;
  std::unique_ptr<StoredWeights> weights_;
  std::unique_ptr<ChunkManager> manager_;
  std::unique_ptr<GradientSink> gradients_;
  std::unique_ptr<StatePlaces> state_places_;
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
  std::unique_ptr<Updater> updater_;
  std::unique_ptr<StateViews> state_views_;
  bool in_child_ = false;
};

}  // namespace castor
