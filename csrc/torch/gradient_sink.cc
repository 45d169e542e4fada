#include "torch/gradient_sink.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "core/error.h"
#include "store/charged_account.h"
#include "store/chunk_pins.h"
#include "store/tensor_errors.h"
#include "torch/step_hooks.h"
#include "torch/torch_device.h"
#include "torch/uses.h"

namespace castor {
namespace {

/// Up to this size torch's copy spends more time on what to do than on the bytes.
constexpr std::size_t kSmallBytes = std::size_t{1} << 14;

/// As to.copy_(from), for small ones that lie alike and that no gate stands before; else returns
/// false.
bool copy_small(const at::Tensor& to, const at::Tensor& from) {
  if (to.nbytes() > kSmallBytes || !to.is_cpu() || is_gated(to) || to.key_set() != from.key_set() ||
      to.dtype() != from.dtype() || to.strides() != from.strides() ||
      !to.is_non_overlapping_and_dense()) {
    return false;
  }
  std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  to.unsafeGetTensorImpl()->bump_version();
  return true;
}

/// Whether somebody else has this very tensor, for whom it has to stay p.grad: what p.grad becomes
/// later is to be seen there, too. Not where torch gives it no other memory.
bool others_hold(const at::Tensor& grad) {
  return uses_of(*grad.unsafeGetTensorImpl()) > 1 && !grad.requires_grad() &&
         !grad.is_inference() && !grad.key_set().has(c10::DispatchKey::Python);
}

/// Whether create_graph=True made this gradient.
bool in_graph(const Gradient& gradient, const at::Tensor& grad) {
  return gradient.in_graph == grad.unsafeGetTensorImpl();
}

}  // namespace

GradientSink::GradientSink(ChunkManager& manager, std::span<const ParamHandle> params,
                           StoredWeights* weights, GradientShards* shards, ParamStorages& absent,
                           Executor& executor, const SessionDevice& device, bool scaled,
                           CopyEngine& engine, NonModelMemory& account,
                           const std::shared_ptr<MemoryTier>& shared_tier)
    : manager_(manager),
      layout_(manager.layout()),
      params_(params),
      weights_(weights),
      shards_(shards),
      absent_(absent),
      norms_(manager, weights, shards, executor, device),
      device_(device),
      scaled_(scaled),
      gradients_(params.size()),
      accumulators_(params.size()),
      in_several_passes_(layout_.chunks().size(), false),
      fresh_(layout_.chunks().size(), false) {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    gradients_[i].required = params_[i].leaf.requires_grad();
    geometries_.push_back(geometry_of(params_[i].local));
  }
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const ChunkSpec& spec = layout_.chunk(chunk);
    if (spec.trainable && !sharded(chunk)) {
      manager_.add_payload(chunk, PayloadKind::kGrad, spec.used_bytes, {},
                           spec.updated_in_shards() ? shared_tier : nullptr);
    }
  }
  if (engine.asynchronous()) {
    copies_ = std::make_unique<GradientCopies>(layout_, engine, manager_.device(),
                                               device_.backend(), account);
  }
}

GradientSink::~GradientSink() = default;

void GradientSink::open(Runtime& runtime, TensorGate& gate,
                        const std::weak_ptr<StepEvents>& events) {
  runtime_ = &runtime;
  gate_ = &gate;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    Gradient& gradient = gradients_[i];
    gradient.storage = make_storage(param);
    if (gradient.storage) {
      gradient.view = make_view(param);
      gradient.position = gate.watch(group(layout_.place(param).chunk), gradient.view);
      gradient.uses = uses_of(gradient.storage);
      accumulators_[i] = watch_gradient(events, param, params_[i].leaf);
    }
  }
}

bool GradientSink::sharded(ChunkId chunk) const {
  return shards_ != nullptr && shards_->sharded(chunk);
}

c10::Storage GradientSink::make_storage(ParamId param) const {
  const ChunkId chunk = layout_.place(param).chunk;
  if (sharded(chunk)) {
    return absent_.storage(param);
  }
  const auto& payload = manager_.payload(chunk, PayloadKind::kGrad);
  if (!payload) {
    return {};
  }
  if (stored(chunk)) {
    return absent_.storage(param);
  }
  const ParamSpec& spec = layout_.param(param);
  return storage_over(payload, layout_.place(param).offset * size_of(spec.type),
                      spec.numel * size_of(spec.type), to_torch(device_.id()));
}

at::Tensor GradientSink::make_view(ParamId param) const {
  return tensor_over(gradients_[index(param)].storage, to_torch(layout_.param(param).type),
                     /*offset=*/0, geometries_[index(param)]);
}

// Whether castor's view is where it was made: its user may have given it other memory, or another
// shape.
bool GradientSink::in_place(ParamId param) const {
  const Gradient& gradient = gradients_[index(param)];
  return lies_over(gradient.view, gradient.storage, to_torch(layout_.param(param).type),
                   geometries_[index(param)]);
}

// Whether p.grad is what the payload holds.
bool GradientSink::live(ParamId param) const {
  const at::Tensor& view = gradients_[index(param)].view;
  return view.defined() && params_[index(param)].leaf.grad().is_same(view) && in_place(param);
}

// Whether other tensors than castor's view are over the gradient's memory.
bool GradientSink::storage_shared(ParamId param) const {
  const Gradient& gradient = gradients_[index(param)];
  return gradient.view.defined() &&
         uses_of(gradient.storage) + (lies_over(gradient.view, gradient.storage) ? 0 : 1) >
             gradient.uses;
}

// p.grad is not the payload's view, which is about to be written: who holds that view, or other
// tensors over its memory, keeps them as they are.
void GradientSink::leave_to_holders(ParamId param) {
  constexpr std::size_t kOwnUses = 2;  // of a view: this one's, and the gate's
  Gradient& gradient = gradients_[index(param)];
  const bool held = uses_of(*gradient.view.unsafeGetTensorImpl()) > kOwnUses;
  const bool shared = storage_shared(param) || (held && lies_over(gradient.view, gradient.storage));
  // A gradient that ranks keep in shards has no memory here to copy: it stays the chunk's.
  const bool copyable = !sharded(layout_.place(param).chunk);
  if ((!copyable || (!held && !shared)) && in_place(param)) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (shared && copyable) {
    separate_storage(param);
  }
  gradient.view = make_view(param);
  gate_->replace(group(layout_.place(param).chunk), gradient.position, gradient.view);
}

void GradientSink::leave_to_holders(ChunkId chunk) {
  for (const ParamId param : layout_.chunk(chunk).params) {
    if (gradients_[index(param)].view.defined() && !live(param)) {
      leave_to_holders(param);
    }
  }
}

void GradientSink::separate_storage(ParamId param) {
  Gradient& gradient = gradients_[index(param)];
  const ChunkId chunk = layout_.place(param).chunk;
  gate_->pass(group(chunk));
  const at::Tensor now = make_view(param);
  gate_->follow(group(chunk), now);
  const Uncharged uncharged;  // as gradients of which castor takes no notice
  at::Tensor copy = now.clone(at::MemoryFormat::Preserve);
  const c10::Storage before = gradient.storage;
  gradient.storage = sharded(chunk) || stored(chunk)
                         ? (absent_.renew(param), absent_.storage(param))
                         : make_storage(param);
  give_memory(before, std::move(copy));
}

std::byte* GradientSink::data(ParamId param) const {
  const ParamPlace place = layout_.place(param);
  std::byte* const all = sharded(place.chunk)
                             ? shards_->copy(place.chunk)
                             : manager_.payload(place.chunk, PayloadKind::kGrad)->data();
  return all + place.offset * size_of(layout_.param(param).type);
}

// zero_grad(set_to_none=False) leaves zeros in place, which carry any scale.
void GradientSink::set_loss_scale(double scale) {
  loss_scale_ = scale;
  if (!scaled_) {
    return;
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    Gradient& gradient = gradients_[i];
    if (params_[i].leaf.grad().is_same(gradient.view) && gradient.view.defined() &&
        gradient.version != version_of(gradient.view) && !gradient.view.any().item<bool>()) {
      gradient.scale = scale;
      gradient.version = version_of(gradient.view);
    }
  }
}

// `max_uses`: of the gradient's storage, as long as nobody but autograd knows it; 0: it is copied
// at once. Returns what went to the host, and when.
GradientCopy GradientSink::adopt(ParamId param, at::Tensor& grad, std::size_t max_uses) {
  Gradient& gradient = gradients_[index(param)];
  const ChunkId chunk = layout_.place(param).chunk;
  if (grad.layout() != at::kStrided) {
    throw tensor_errors::sparse_gradient(layout_.param(param).name);
  }
  if (grad.sizes() != geometries_[index(param)].sizes) {
    throw tensor_errors::gradient_of_other_shape(layout_.param(param).name);
  }
  if (const auto type = to_torch(layout_.param(param).type);
      grad.scalar_type() != type && !in_graph(gradient, grad)) {
    throw tensor_errors::gradient_of_other_type(layout_.param(param).name,
                                                toString(grad.scalar_type()), toString(type));
  }
  const at::NoGradGuard no_grad;
  const bool leaves_device = manager_.placement(chunk) != Placement::kDevice;
  if (stored(chunk) || sharded(chunk)) {
    leave_to_holders(chunk);  // it is forgotten as one
  } else {
    leave_to_holders(param);
  }
  forget_stored(chunk);
  const bool kept = others_hold(grad);
  if (leaves_device && gathered_ != nullptr && gathered_->gathering(chunk)) {
    if (!kept && gather(param, grad)) {
      grad = gradient.view;
      return {};
    }
    gate_->pass(group(chunk));  // moves the others to the host: who holds this one may look there
  }
  if (sharded(chunk)) {
    shards_->take_copy(chunk, contents_of_copy(chunk));
  }
  const std::uint64_t start_ns = leaves_device ? runtime_->clock_ns() : 0;
  if (leaves_device && copies_ && !kept && !stored(chunk) &&
      grad.storage().use_count() <= max_uses && send(param, grad)) {
    gate_->close(group(chunk));
  } else if (!copy_small(gradient.view, grad)) {
    gradient.view.copy_(grad);
  }
  const std::uint64_t end_ns = leaves_device ? runtime_->clock_ns() : 0;
  if (kept) {
    grad.set_data(gradient.view);
    gradient.view = grad;
    gate_->replace(group(chunk), gradient.position, gradient.view);
  } else {
    grad = gradient.view;
  }
  if (!leaves_device) {
    return {};
  }
  bytes_moved_ += gradient.view.nbytes();
  return {.bytes = gradient.view.nbytes(), .start_ns = start_ns, .end_ns = end_ns};
}

// Copies the gradient to those of its chunk that gather on the device. Returns false where the
// chunk does not any more.
bool GradientSink::gather(ParamId param, const at::Tensor& grad) {
  return gathered_->add(param, [&](std::span<std::byte> buffer, bool first) {
    const ParamSpec& spec = layout_.param(param);
    const auto options = at::TensorOptions().device(to_torch(device_.id()));
    if (first) {  // what lies between parameters, and behind the last one, is added up as well
      at::for_blob(buffer.data(), static_cast<std::int64_t>(buffer.size()))
          .options(options.dtype(at::kByte))
          .target_device(options.device())
          .make_tensor()
          .zero_();
    }
    at::for_blob(buffer.data() + layout_.place(param).offset * size_of(spec.type),
                 geometries_[index(param)].sizes)
        .strides(geometries_[index(param)].strides)
        .options(options.dtype(to_torch(spec.type)))
        .target_device(options.device())
        .make_tensor()
        .copy_(grad);
  });
}

// Sends the gradient to its payload by a copy beside backward, if all of its memory is the
// payload's in the same order. Returns whether it did.
bool GradientSink::send(ParamId param, const at::Tensor& grad) {
  const at::Tensor& like = gradients_[index(param)].view;
  const std::size_t bytes = like.nbytes();
  return grad.storage_offset() == 0 && grad.storage().nbytes() == bytes &&
         grad.scalar_type() == like.scalar_type() && grad.strides() == like.strides() &&
         grad.is_non_overlapping_and_dense() &&
         copies_->submit(layout_.place(param).chunk,
                         {static_cast<std::byte*>(grad.mutable_data_ptr()), bytes},
                         std::make_shared<at::Tensor>(grad), {data(param), bytes});
}

// The first gradient since zero_grad: what a payload on NVMe holds is the step's before, and
// forgotten where nobody has a tensor over it.
void GradientSink::forget_stored(ChunkId chunk) {
  if (!stored(chunk)) {
    return;
  }
  if (!seen(chunk)) {
    gate_->pass(group(chunk));
    weights_->discard_gradients(chunk);
  }
}

std::optional<ChunkId> GradientSink::arrived(ParamId param, const at::Tensor& incoming,
                                             bool nested) {
  at::Tensor& grad = params_[index(param)].leaf.mutable_grad();
  Gradient& gradient = gradients_[index(param)];
  if (grad.requires_grad()) {
    // create_graph=True: the gradient is part of a graph; collect copies it.
    gradient.in_graph = grad.unsafeGetTensorImpl();
    gradient.scale = loss_scale_;
    return std::nullopt;
  }
  GradientCopy copy;
  if (grad.is_same(gradient.view) && !in_place(param)) {
    check_scale(param);  // it was given other memory, and more was added to that
    copy = adopt(param, grad, 0);
  } else if (!grad.is_same(gradient.view)) {
    // Where AccumulateGrad took `incoming` over as it is, the engine still holds it, and the tensor
    // that it is a view of (a transposed weight's gradient).
    const bool taken_over = incoming.defined() && incoming.layout() == at::kStrided &&
                            grad.layout() == at::kStrided && incoming.is_alias_of(grad);
    copy = adopt(param, grad, taken_over ? 3 : 1);
    gradient.scale = loss_scale_;
  } else {
    check_scale(param);
  }
  gradient.version = version_of(gradient.view);
  const ChunkId chunk = layout_.place(param).chunk;
  fresh_[index(chunk)] = true;
  if (nested) {
    in_several_passes_[index(chunk)] = true;
  }
  return runtime_->grad_ready(param, copy) && !in_several_passes(chunk) ? std::optional(chunk)
                                                                        : std::nullopt;
}

void GradientSink::rows_arrived(ParamId param, const at::Tensor& rows,
                                const at::Tensor& gradients) {
  const ParamSpec& spec = layout_.param(param);
  const at::IntArrayRef sizes = geometries_[index(param)].sizes;
  if (sizes.empty() || gradients.dim() != static_cast<std::int64_t>(sizes.size()) ||
      gradients.size(0) != rows.numel() || gradients.sizes().slice(1) != sizes.slice(1) ||
      gradients.scalar_type() != to_torch(spec.type)) {
    throw InvalidArgument("gradients of " + std::to_string(rows.numel()) + " rows of parameter '" +
                          spec.name + "' have another shape or type than these rows");
  }
  const at::NoGradGuard no_grad;
  const ChunkId chunk = layout_.place(param).chunk;
  Gradient& gradient = gradients_[index(param)];
  in_several_passes_[index(chunk)] = true;
  const bool first = !params_[index(param)].leaf.grad().defined();
  if (!first && live(param)) {
    check_scale(param);
  }
  gate_->pass(group(chunk));
  make_present(param, loss_scale_);
  const std::uint64_t start_ns = runtime_->clock_ns();
  if (first) {
    gradient.view.index_copy_(0, rows, gradients);
  } else {
    gradient.view.index_add_(0, rows, gradients);
  }
  gradient.version = version_of(gradient.view);
  fresh_[index(chunk)] = true;
  GradientCopy copy;
  if (manager_.placement(chunk) != Placement::kDevice) {
    copy = {.bytes = gradients.nbytes(), .start_ns = start_ns, .end_ns = runtime_->clock_ns()};
    bytes_moved_ += copy.bytes;
  }
  static_cast<void>(runtime_->grad_ready(param, copy));
}

void GradientSink::check_scale(ParamId param) const {
  const Gradient& gradient = gradients_[index(param)];
  if (gradient.scale != loss_scale_) {
    throw tensor_errors::loss_scale_changed(layout_.param(param).name, gradient.scale, loss_scale_);
  }
}

void GradientSink::expect_several_passes(std::span<const ChunkId> chunks) {
  for (const ChunkId chunk : chunks) {
    in_several_passes_[index(chunk)] = true;
  }
}

GradientMarks GradientSink::marks() const {
  GradientMarks marks(layout_);
  marks.fresh = fresh_;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& grad = params_[i].leaf.grad();
    marks.present[i] = trainable(ParamId{static_cast<std::uint32_t>(i)}) && grad.defined();
    if (marks.present[i] && !marks.scale && grad.is_same(gradients_[i].view)) {
      marks.scale = gradients_[i].scale;
    }
  }
  return marks;
}

void GradientSink::make_present(ParamId param, double scale) {
  at::Tensor& grad = params_[index(param)].leaf.mutable_grad();
  Gradient& gradient = gradients_[index(param)];
  if (live(param)) {
    return;
  }
  if (grad.defined()) {  // assigned by the user
    adopt(param, grad, 0);
  } else {
    leave_to_holders(param);
    if (device_.holds(manager_, layout_.place(param).chunk)) {
      const at::NoGradGuard no_grad;
      gradient.view.zero_();
    } else {
      std::memset(data(param), 0, gradient.view.nbytes());
    }
    grad = gradient.view;
  }
  gradient.scale = scale;
  gradient.version = version_of(gradient.view);
}

// Nobody sees what the others have where there is no tensor over it.
GradientShards::Contents GradientSink::contents_of_copy(ChunkId chunk) const {
  return seen(chunk) ? GradientShards::Contents::kMean : GradientShards::Contents::kZeros;
}

void GradientSink::average(ChunkId chunk, const std::function<void()>& work) {
  leave_to_holders(chunk);  // all of it becomes the ranks'
  const ChunkPins held(*runtime_, device_, std::span(&chunk, 1));
  device_.await();  // it may have written gradients where they are
  work();
  fresh_[index(chunk)] = false;
}

GradientSummary GradientSink::collect(bool with_norm, const Measure& measure_shards) {
  GradientSummary summary;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    Gradient& gradient = gradients_[i];
    gradient.present = trainable(param) && params_[i].leaf.grad().defined();
    if (!gradient.present) {
      continue;
    }
    at::Tensor& grad = params_[i].leaf.mutable_grad();
    if (scaled_ && gradient.scale != 1.0 && grad.is_same(gradient.view) && !untouched(param)) {
      throw tensor_errors::edited_while_scaled(layout_.param(param).name, gradient.scale);
    }
    if (!live(param)) {
      if (!grad.is_same(gradient.view) && !in_graph(gradient, grad)) {
        gradient.scale = 1.0;  // assigned by the user
      }
      adopt(param, grad, 0);
    } else if (refuses_edits_ && !untouched(param) && gradient.view.any().item<bool>()) {
      throw tensor_errors::edited_where_sharded(layout_.param(param).name);
    }
    if (summary.num_gradients++ == 0) {
      summary.scale = gradient.scale;
    } else if (summary.scale != gradient.scale) {
      throw tensor_errors::other_loss_scale(layout_.param(param).name, gradient.scale,
                                            summary.scale);
    }
  }
  device_.await();  // it may have written gradients where they are
  if (with_norm) {
    summary.squares = norms_.squares(
        *runtime_, [this](ParamId param) { return present(param); }, measure_shards);
    summary.norm = std::sqrt(std::accumulate(summary.squares.begin(), summary.squares.end(), 0.0));
  }
  return summary;
}

void GradientSink::scale(double factor) {
  device_.follow_stream();
  for (Gradient& gradient : gradients_) {
    if (gradient.present) {
      const at::NoGradGuard no_grad;
      gradient.view.mul_(factor);
      gradient.version = version_of(gradient.view);
    }
  }
}

bool GradientSink::untouched(ParamId param) const {
  const Gradient& gradient = gradients_[index(param)];
  return gradient.version == version_of(gradient.view) && in_place(param);
}

void GradientSink::wait(ChunkId chunk) {
  if (copies_) {
    copies_->wait(chunk);
  }
}

void GradientSink::wait_beside(ChunkId chunk) {
  if (copies_) {
    copies_->wait_beside(chunk);
  }
}

void GradientSink::for_each_storage(const std::function<void(const c10::Storage&)>& visit) const {
  for (const Gradient& gradient : gradients_) {
    if (gradient.storage) {
      visit(gradient.storage);
    }
  }
}

bool GradientSink::seen(ChunkId chunk) const {
  const auto& params = layout_.chunk(chunk).params;
  return aliased(chunk) || std::any_of(params.begin(), params.end(), [this](ParamId param) {
           const at::Tensor& view = gradients_[index(param)].view;
           return view.defined() && params_[index(param)].leaf.grad().is_same(view);
         });
}

bool GradientSink::aliased(ChunkId chunk) const {
  const auto& params = layout_.chunk(chunk).params;
  return std::any_of(params.begin(), params.end(),
                     [this](ParamId param) { return storage_shared(param); });
}

}  // namespace castor
