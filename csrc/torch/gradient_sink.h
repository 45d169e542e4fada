#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/consistency_check.h"
#include "core/runtime.h"
#include "store/chunk_gradients.h"
#include "store/gradient_copies.h"
#include "store/gradient_norms.h"
#include "store/gradient_shards.h"
#include "store/session_device.h"
#include "store/stored_weights.h"
#include "torch/chunk_storages.h"
#include "torch/param_gradient.h"
#include "torch/param_storages.h"
#include "torch/step_events.h"
#include "torch/tensor_gate.h"
#include "torch/torch_versions.h"

namespace castor {

/// Destination of a model's gradients: they come from autograd, or from a user's p.grad, and move
/// into the payloads of their chunks. p.grad becomes a view of the payload. The sink also keeps the
/// loss scale that gradients carry, and computes their norm.
///
/// A chunk that has a gradient of each parameter looks complete, but more may come in the same
/// step. Reentrant checkpoints run a backward pass of their own for each segment, within the one
/// around them, and several backward passes may precede a step. The sink tells of a chunk early
/// only where one pass brings all of its gradients. Every chunk is complete when collect() closes
/// the step.
///
/// A payload is used again for each step's gradient. A tensor over an earlier gradient that
/// somebody still holds by then (p.grad kept across zero_grad, a view, p.grad.detach()) keeps the
/// earlier values, in memory of its own.
///
/// Owned by the session. One thread at a time runs backward and step; any thread may call wait()
/// and bytes_moved().
class GradientSink final : public ChunkGradients {
 public:
  /// Adds the gradient payloads of every trainable chunk to `manager`, except those that are
  /// sharded in `shards` (nullptr: none are). `absent`: storages of the gradients that `weights`
  /// or `shards` bring into memory. On the host, chunks that ranks update in shards take
  /// their payloads from `shared_tier` (nullptr: the manager's tier). `params` are in ParamId
  /// order. `scaled`: gradients may carry a loss scale. Where `engine` copies beside the caller,
  /// gradients leave the device by copies beside backward (GradientCopies), whose window is taken
  /// here: plans count on what is left. `account`: the account of the device's non-model memory.
  /// All arguments outlive this. Throws OutOfMemory.
  GradientSink(ChunkManager& manager, std::span<const ParamHandle> params, StoredWeights* weights,
               GradientShards* shards, ParamStorages& absent, Executor& executor,
               const SessionDevice& device, bool scaled, CopyEngine& engine,
               NonModelMemory& account, const std::shared_ptr<MemoryTier>& shared_tier = nullptr);
  ~GradientSink() override;  // in the .cc file: Node is incomplete here
  GradientSink(const GradientSink&) = delete;
  GradientSink& operator=(const GradientSink&) = delete;

  /// Starts to follow gradients, once the parameters lie in chunks. From now on `events` is told
  /// after AccumulateGrad of each parameter, and the gate holds readers back from gradients on
  /// their way.
  void open(Runtime& runtime, TensorGate& gate, const std::weak_ptr<StepEvents>& events);

  /// Returns the gate's group of a chunk's gradients.
  [[nodiscard]] std::size_t group(ChunkId chunk) const noexcept {
    return gradient_group(layout_, chunk);
  }
  /// Moves a fresh gradient into its payload and makes p.grad a view of it. `nested`: a pass within
  /// another one brings the gradient. Returns the chunk if no more gradients can come for it.
  [[nodiscard]] std::optional<ChunkId> arrived(ParamId param, const at::Tensor& incoming,
                                               bool nested);
  /// Adds gradients of some rows of a parameter to its payload in host memory, and makes p.grad a
  /// view of it. `rows`: numbers of the rows, each once, where torch's operators read them for
  /// `gradients`, [rows, ...]. The other rows of a gradient that was not there are zeros, which the
  /// host writes. A chunk of which rows arrive is complete at collect() alone, since other calls of
  /// the same pass may bring more. Requires that the host has read `rows` since the last step, so
  /// that the device no longer uses what the payload held then. Throws InvalidArgument for
  /// gradients of another shape or type than those of such rows.
  void rows_arrived(ParamId param, const at::Tensor& rows, const at::Tensor& gradients);
  /// Notes that several passes of this step may bring gradients of these chunks.
  void expect_several_passes(std::span<const ChunkId> chunks);
  [[nodiscard]] bool in_several_passes(ChunkId chunk) const override {
    return in_several_passes_[index(chunk)];
  }
  /// Sets the scale of the loss that the coming backward passes differentiate (fp16); 1 without
  /// scaling.
  void set_loss_scale(double scale);
  /// Makes collect() refuse gradients that were edited in place from now on, because ranks shard
  /// the model: clip_grad_norm_ takes the norm of this rank's gradients for the model's.
  void refuse_edits() { refuses_edits_ = true; }

  // For several ranks, whose gradients RankGradients reduces to their mean.
  [[nodiscard]] GradientMarks marks() const override;
  void make_present(ParamId param, double scale) override;
  void average(ChunkId chunk, const std::function<void()>& work) override;
  void gather_in(DeviceGradients* gathered) override { gathered_ = gathered; }
  void hand_over(ChunkId chunk) override { fresh_[index(chunk)] = false; }
  [[nodiscard]] Payload* payload(ChunkId chunk) const override {
    return manager_.payload(chunk, PayloadKind::kGrad).get();
  }

  /// Function that adds the squares of sharded gradients; see GradientSummary.
  using Measure = GradientNorms::Measure;
  /// Closes the step: every gradient is in its payload, also those that users assigned. Throws
  /// UsageError for gradients that were scaled differently, edited while scaled, or edited where
  /// ranks shard the model.
  [[nodiscard]] GradientSummary collect(bool with_norm, const Measure& measure_shards);
  /// Multiplies every gradient payload, in place, for optimizers that are no update rule of
  /// castor's.
  void scale(double factor);
  /// Begins the next step, whose gradients may come from now on.
  void begin_step() { in_several_passes_.assign(in_several_passes_.size(), false); }

  /// Returns whether the parameter required a gradient when it was taken over.
  [[nodiscard]] bool required(ParamId param) const { return gradients_[index(param)].required; }
  void leave_to_holders(ChunkId chunk) override;
  [[nodiscard]] bool present(ParamId param) const override {
    return gradients_[index(param)].present;
  }
  [[nodiscard]] bool untouched(ParamId param) const override;
  void wait(ChunkId chunk) override;
  void wait_beside(ChunkId chunk) override;
  [[nodiscard]] std::unique_ptr<ComputeFence> fence() const override { return device_.fence(); }
  [[nodiscard]] CopyTicket last_copy_of(ChunkId chunk) const override {
    return copies_ ? copies_->last_of(chunk) : CopyTicket::kNone;
  }
  /// Returns whether somebody holds another tensor over the chunk's gradients than p.grad.
  [[nodiscard]] bool aliased(ChunkId chunk) const;
  [[nodiscard]] bool seen(ChunkId chunk) const override;
  [[nodiscard]] GradientShards::Contents contents_of_copy(ChunkId chunk) const override;
  /// Returns the storage of the parameter's gradient in its payload; an empty one where there is no
  /// payload.
  [[nodiscard]] const c10::Storage& storage(ParamId param) const {
    return gradients_[index(param)].storage;
  }
  /// Calls `visit` for the storage of every gradient, in memory or not.
  void for_each_storage(const std::function<void(const c10::Storage&)>& visit) const;
  /// Returns the bytes that went from the device to payloads on the host.
  [[nodiscard]] std::uint64_t bytes_moved() const noexcept {
    return bytes_moved_ + (gathered_ == nullptr ? 0 : gathered_->bytes_moved());
  }

 private:
  [[nodiscard]] bool trainable(ParamId param) const { return layout_.param(param).trainable; }
  [[nodiscard]] bool stored(ChunkId chunk) const { return manager_.gradients_stored(chunk); }
  [[nodiscard]] bool sharded(ChunkId chunk) const;
  [[nodiscard]] c10::Storage make_storage(ParamId param) const;
  [[nodiscard]] at::Tensor make_view(ParamId param) const;
  [[nodiscard]] bool in_place(ParamId param) const;
  [[nodiscard]] bool live(ParamId param) const;
  [[nodiscard]] bool storage_shared(ParamId param) const;
  void leave_to_holders(ParamId param);
  void separate_storage(ParamId param);
  void check_scale(ParamId param) const;
  /// Returns the address of the parameter's gradient. Requires that the gradient is in memory.
  [[nodiscard]] std::byte* data(ParamId param) const;
  GradientCopy adopt(ParamId param, at::Tensor& grad, std::size_t max_uses);
  void forget_stored(ChunkId chunk);
  [[nodiscard]] bool gather(ParamId param, const at::Tensor& grad);
  [[nodiscard]] bool send(ParamId param, const at::Tensor& grad);

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  const std::span<const ParamHandle> params_;
  StoredWeights* const weights_;
  GradientShards* const shards_;
  ParamStorages& absent_;
  const GradientNorms norms_;
  const SessionDevice& device_;
  const bool scaled_;
  Runtime* runtime_ = nullptr;
  TensorGate* gate_ = nullptr;
  DeviceGradients* gathered_ = nullptr;  // nullptr: all gradients of streamed chunks go to the host
  std::unique_ptr<GradientCopies> copies_;  // nullptr where copies are not asynchronous
  std::vector<Gradient> gradients_;         // per parameter
  std::vector<ParamGeometry> geometries_;   // per parameter: geometry of its gradient
  std::vector<torch_versions::NodePointer> accumulators_;
  std::vector<bool> in_several_passes_;  // per chunk
  std::vector<bool> fresh_;              // per chunk: see GradientMarks
  double loss_scale_ = 1.0;
  bool refuses_edits_ = false;
  std::atomic<std::uint64_t> bytes_moved_ = 0;
};

}  // namespace castor
