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

#include "core/rank_meeting.h"
#include "core/runtime.h"
#include "torch/chunk_storages.h"
#include "torch/gradient_copies.h"
#include "torch/gradient_parts.h"
#include "torch/param_gradient.h"
#include "torch/session_device.h"
#include "torch/step_events.h"
#include "torch/stored_weights.h"
#include "torch/tensor_gate.h"
#include "torch/torch_versions.h"

namespace castor {

/// Where a model's gradients go: from autograd, or a user's p.grad, into the payloads of their
/// chunks, of which p.grad becomes a view; with the loss scale that they carry, and their norm.
///
/// A chunk that has a gradient of each parameter looks complete, and is not where more may come in
/// the same step: reentrant checkpoints run a backward pass of their own for each segment, within
/// the one around them, and several backwards may precede a step. The sink tells of a chunk early
/// only where one pass brings all it gets; every chunk is complete when collect() closes the step.
///
/// A payload is used again for each step's gradient. Whoever holds the tensor of an earlier one by
/// then (p.grad kept across zero_grad, a view, p.grad.detach()) keeps it, with memory of its own.
///
/// Owned by the session. One thread at a time runs backward and step; wait() and bytes_moved() may
/// be called from any.
class GradientSink {
 public:
  /// Adds the gradient payloads of every trainable chunk to `manager`, on the host in `homes`
  /// (nullptr: its tier), but for those that are in `parts` (nullptr: none). `params` are in
  /// ParamId order; `scaled`: gradients may carry a loss scale. All outlive this. Throws
  /// OutOfMemory.
  GradientSink(ChunkManager& manager, std::span<const ParamHandle> params, StoredWeights* weights,
               GradientParts* parts, Executor& executor, const SessionDevice& device, bool scaled,
               const std::shared_ptr<MemoryTier>& homes = nullptr);
  ~GradientSink();  // in the .cc file: Node is incomplete here
  GradientSink(const GradientSink&) = delete;
  GradientSink& operator=(const GradientSink&) = delete;

  /// Gradients leave the device by copies that run beside backward; see GradientCopies. `account`:
  /// of what is allocated there for others than castor.
  void copy_beside_backward(CopyEngine& engine, NonModelMemory& account);
  /// Once the parameters lie in chunks: from now on `events` follow AccumulateGrad of each, and the
  /// gate holds readers back from gradients on their way.
  void open(Runtime& runtime, TensorGate& gate, const std::weak_ptr<StepEvents>& events);

  /// The gate's group of a chunk's gradients.
  [[nodiscard]] std::size_t group(ChunkId chunk) const noexcept {
    return layout_.chunks().size() + index(chunk);
  }
  /// Moves a fresh gradient into its payload and makes p.grad a view of it. `nested`: a pass within
  /// another one brings it. Returns the chunk where nothing more can come for it.
  [[nodiscard]] std::optional<ChunkId> arrived(ParamId param, const at::Tensor& incoming,
                                               bool nested);
  /// Several passes of this step may bring gradients of these chunks.
  void expect_parts(std::span<const ChunkId> chunks);
  [[nodiscard]] bool in_parts(ChunkId chunk) const { return in_parts_[index(chunk)]; }
  /// The scale of the loss that the coming backward passes differentiate (fp16), 1 without scaling.
  void set_loss_scale(double scale);
  /// Ranks divide the model: from now on gradients that were edited in place are refused, by whom a
  /// norm of this rank's alone was taken for the model's.
  void refuse_edits() { refuses_edits_ = true; }

  // Of several ranks, whose gradients RankGradients brings together.
  /// What this rank has.
  [[nodiscard]] GradientMarks marks() const;
  /// A rank has a gradient of the parameter, of a loss with that scale: it comes into its payload,
  /// where this rank has none as zeros.
  void make_present(ParamId param, double scale);
  /// Calls `work` while all of the chunk's gradients are in memory, complete: they become those of
  /// all ranks.
  void average(ChunkId chunk, const std::function<void()>& work);
  /// All of the chunk's have come, and become those of all ranks without average().
  void hand_over(ChunkId chunk) { fresh_[index(chunk)] = false; }
  /// nullptr where the chunk is frozen, or its gradients are in parts.
  [[nodiscard]] const Payload* payload(ChunkId chunk) const {
    return manager_.payload(chunk, PayloadKind::kGrad).get();
  }

  /// Closes the step: every gradient is in its payload, also those that users assigned. Throws
  /// UsageError for gradients that were scaled differently, edited while scaled, or edited where
  /// ranks divide the model.
  /// `measure_parts`: adds the squares of gradients that are in parts; see GradientSummary.
  using Measure = std::function<void(std::span<double> squares)>;
  [[nodiscard]] GradientSummary collect(bool with_norm, const Measure& measure_parts);
  /// Multiplies every gradient payload, in place (for optimizers that are no rule of castor's).
  void scale(double factor);
  /// The next step's gradients may come.
  void begin_step() { in_parts_.assign(in_parts_.size(), false); }

  /// Whether the parameter required a gradient when it was taken over.
  [[nodiscard]] bool required(ParamId param) const { return gradients_[index(param)].required; }
  /// Call before the chunk's payload is overwritten: tensors over gradients that p.grad no longer
  /// refers to get memory of their own, so that their holders keep the values.
  void leave_to_holders(ChunkId chunk);
  /// Of the parameter, at the last collect(): whether it has a gradient ...
  [[nodiscard]] bool present(ParamId param) const { return gradients_[index(param)].present; }
  /// ... and nobody has written it since castor did.
  [[nodiscard]] bool untouched(ParamId param) const;
  /// Returns when the chunk's gradients have arrived; rethrows a copy's failure.
  void wait(ChunkId chunk);
  /// The ticket of the chunk's latest gradient that is on its way; kNone if there is none.
  [[nodiscard]] CopyTicket last_copy_of(ChunkId chunk) const {
    return copies_ ? copies_->last_of(chunk) : CopyTicket::kNone;
  }
  /// Whether somebody holds another tensor over the chunk's gradients than p.grad.
  [[nodiscard]] bool aliased(ChunkId chunk) const;
  /// Whether there is any tensor over them.
  [[nodiscard]] bool seen(ChunkId chunk) const;
  /// Of gradients in parts.
  [[nodiscard]] GradientParts::Contents contents_of_copy(ChunkId chunk) const;
  /// The storage of the parameter's gradient in its payload; none where it has no payload.
  [[nodiscard]] const c10::Storage& storage(ParamId param) const {
    return gradients_[index(param)].storage;
  }
  /// Of the payloads in memory and on NVMe.
  void for_each_storage(const std::function<void(const c10::Storage&)>& visit) const;
  /// Bytes that went from the device to payloads on the host.
  [[nodiscard]] std::uint64_t bytes_moved() const noexcept { return bytes_moved_; }

 private:
  [[nodiscard]] bool trainable(ParamId param) const { return layout_.param(param).trainable; }
  [[nodiscard]] bool stored(ChunkId chunk) const { return manager_.gradients_stored(chunk); }
  [[nodiscard]] bool cut(ChunkId chunk) const;
  [[nodiscard]] c10::Storage make_storage(ParamId param) const;
  [[nodiscard]] at::Tensor make_view(ParamId param) const;
  [[nodiscard]] bool in_place(ParamId param) const;
  [[nodiscard]] bool live(ParamId param) const;
  [[nodiscard]] bool storage_shared(ParamId param) const;
  void leave_to_holders(ParamId param);
  void part_storage(ParamId param);
  void check_scale(ParamId param) const;
  /// In memory.
  [[nodiscard]] std::byte* data(ParamId param) const;
  GradientCopy adopt(ParamId param, at::Tensor& grad, std::size_t max_uses);
  void forget_stored(ChunkId chunk);
  [[nodiscard]] double square_norm(ParamId param, const std::byte* data, Executor* executor) const;
  void measure_on_device(std::span<double> squares) const;
  void measure_stored(std::span<double> squares) const;
  [[nodiscard]] std::vector<double> squares(const Measure& measure_parts) const;

  ChunkManager& manager_;
  const ChunkLayout& layout_;
  const std::span<const ParamHandle> params_;
  StoredWeights* const weights_;
  GradientParts* const parts_;
  Executor& executor_;
  const SessionDevice& device_;
  const bool scaled_;
  Runtime* runtime_ = nullptr;
  TensorGate* gate_ = nullptr;
  std::unique_ptr<GradientCopies> copies_;  // nullptr where copies are not asynchronous
  std::vector<Gradient> gradients_;         // per parameter
  std::vector<ParamGeometry> geometries_;   // per parameter: of its gradient
  std::vector<torch_versions::NodePointer> accumulators_;
  std::vector<bool> in_parts_;  // per chunk
  std::vector<bool> fresh_;     // per chunk: see GradientMarks
  double loss_scale_ = 1.0;
  bool refuses_edits_ = false;
  std::atomic<std::uint64_t> bytes_moved_ = 0;
};

}  // namespace castor
