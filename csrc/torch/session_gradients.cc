#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "optim/gradient.h"
#include "torch/counting_allocator.h"
#include "torch/session.h"

// The part of Session between a gradient's arrival and the update.
namespace castor {

// zero_grad(set_to_none=False) leaves zeros in place, which carry any scale.
void Session::set_loss_scale(double scale) {
  loss_scale_ = scale;
  if (!scaled_precision_) {
    return;
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    Gradient& gradient = gradients_[i];
    if (params_[i].grad().is_same(gradient.view) && gradient.view.defined() &&
        gradient.version != version_of(gradient.view) && !gradient.view.any().item<bool>()) {
      gradient.scale = scale;
      gradient.version = version_of(gradient.view);
    }
  }
}

// `max_uses`: of the gradient's storage, as long as nobody but autograd knows it; 0: it is copied
// at once.
GradientCopy Session::adopt_gradient(ParamId param, at::Tensor& grad, std::size_t max_uses) {
  Gradient& gradient = gradients_[index(param)];
  const ChunkId chunk = layout_.place(param).chunk;
  if (grad.layout() != at::kStrided) {
    throw UsageError("parameter '" + layout_.param(param).name +
                     "' received a sparse gradient, which castor does not support; build the "
                     "embedding with sparse=False");
  }
  if (grad.sizes() != gradient.view.sizes()) {
    throw UsageError("the gradient assigned to parameter '" + layout_.param(param).name +
                     "' has another shape than the parameter");
  }
  const at::NoGradGuard no_grad;
  const bool leaves_device = manager_->placement(chunk) != Placement::kDevice;
  begin_gradients_of(chunk);
  const std::uint64_t start_ns = runtime_->clock_ns();
  if (leaves_device && gradient_copies_ && !stored(chunk) &&
      grad.storage().use_count() <= max_uses &&
      gradient_copies_->submit(
          chunk, grad, gradient.view,
          {optimizer_state_->element(param, PayloadKind::kGrad), gradient.view.nbytes()})) {
    gate_->close(gradient_group(chunk));
  } else {
    gradient.view.copy_(grad);
  }
  const std::uint64_t end_ns = runtime_->clock_ns();
  grad = gradient.view;
  if (!leaves_device) {
    return {};
  }
  gradient_bytes_moved_ += gradient.view.nbytes();
  return {.bytes = gradient.view.nbytes(), .start_ns = start_ns, .end_ns = end_ns};
}

void Session::gradient_arrived(ParamId param, const at::Tensor& incoming) {
  own_device_.follow_stream();
  follow_backward_pass();
  at::Tensor& grad = params_[index(param)].mutable_grad();
  Gradient& gradient = gradients_[index(param)];
  if (!grad.defined()) {
    return;
  }
  if (updated(param)) {
    check_no_update_yet("another gradient of parameter '" + layout_.param(param).name +
                        "' arrived");
  }
  if (grad.requires_grad()) {
    // create_graph=True: the gradient is part of a graph; collect_gradients copies it.
    gradient.in_graph = grad.unsafeGetTensorImpl();
    gradient.scale = loss_scale_;
    return;
  }
  GradientCopy copy;
  if (!grad.is_same(gradient.view)) {
    // Where AccumulateGrad took `incoming` over as it is, the engine still holds it, and the tensor
    // that it is a view of (a transposed weight's gradient).
    const bool taken_over = incoming.defined() && incoming.layout() == at::kStrided &&
                            grad.layout() == at::kStrided && incoming.is_alias_of(grad);
    copy = adopt_gradient(param, grad, taken_over ? 3 : 1);
    gradient.scale = loss_scale_;
  } else if (gradient.scale != loss_scale_) {
    throw UsageError("the gradient of parameter '" + layout_.param(param).name +
                     "' was accumulated with loss scale " + std::to_string(gradient.scale) +
                     " and now with " + std::to_string(loss_scale_) +
                     "; use booster.backward for every micro-batch of a step, and zero_grad "
                     "between steps");
  }
  gradient.version = version_of(gradient.view);
  const ChunkId chunk = layout_.place(param).chunk;
  if (backward_passes_.size() > 1) {
    expect_parts(std::span(&chunk, 1));
  }
  if (runtime_->grad_ready(param, copy) && !armed_groups_.empty()) {
    completed_.push_back(chunk);
    update_completed_chunks();
  }
}

// Of the chunks that backward has not updated; those are used already, and may still be under way.
void Session::await_gradients() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    if (!updated_[i]) {
      gate_->pass(i);
      gate_->pass(gradient_group(ChunkId{static_cast<std::uint32_t>(i)}));
    }
  }
}

GradientSummary Session::collect_gradients(bool with_norm) {
  check_whole();
  own_device_.follow_stream();
  runtime_->begin_update();
  completed_.clear();  // adam_step updates what is left
  await_gradients();
  GradientSummary summary;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    Gradient& gradient = gradients_[i];
    gradient.present = trainable(param) && params_[i].grad().defined();
    if (!gradient.present) {
      continue;
    }
    at::Tensor& grad = params_[i].mutable_grad();
    if (!grad.is_same(gradient.view)) {
      if (gradient.in_graph != grad.unsafeGetTensorImpl()) {
        gradient.scale = 1.0;  // assigned by the user
      }
      adopt_gradient(param, grad, 0);
    } else if (scaled_precision_ && gradient.scale != 1.0 &&
               gradient.version != version_of(gradient.view)) {
      throw UsageError("the gradient of parameter '" + layout_.param(param).name +
                       "' was edited while it carries the loss scale " +
                       std::to_string(gradient.scale) +
                       "; clip with GeminiPlugin(max_norm=...), which knows the scale");
    }
    if (summary.num_gradients++ == 0) {
      summary.scale = gradient.scale;
    } else if (summary.scale != gradient.scale) {
      throw UsageError("the gradient of parameter '" + layout_.param(param).name +
                       "' carries loss scale " + std::to_string(gradient.scale) +
                       ", others carry " + std::to_string(summary.scale) +
                       "; use booster.backward for every micro-batch of a step");
    }
  }
  own_device_.await();  // it may have written gradients where they are
  summary.norm = with_norm ? gradient_norm() : 0.0;
  return summary;
}

double Session::gradient_norm() const {
  constexpr std::size_t kParallelNumel = std::size_t{1} << 18;
  std::vector<double> squares(params_.size(), 0.0);
  std::vector<ChunkId> chunks;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    chunks.push_back(ChunkId{static_cast<std::uint32_t>(i)});
  }
  const auto held = hold_on_device(chunks);
  own_device_.square_norms(*optimizer_state_, layout_, gradients_, squares);
  const auto on_host = [&](std::size_t i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    return gradients_[i].present && !optimizer_state_->on_device(layout_.place(param).chunk);
  };
  const auto measure_at = [&](ParamId param, const std::byte* gradient, Executor* executor) {
    const ParamSpec& spec = layout_.param(param);
    squares[index(param)] =
        copy_and_square_norm(executor, nullptr, gradient, spec.numel, spec.type);
  };
  const auto measure = [&](std::size_t i, Executor* executor) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    if (!stored(layout_.place(param).chunk)) {
      measure_at(param, optimizer_state_->element(param, PayloadKind::kGrad), executor);
    }
  };
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (on_host(i) && layout_.params()[i].numel >= kParallelNumel) {
      measure(i, executor_.get());
    }
  }
  executor_->parallel_for(layout_.chunks().size(), [&](std::size_t chunk) {
    for (const ParamId param : layout_.chunks()[chunk].params) {
      if (on_host(index(param)) && layout_.param(param).numel < kParallelNumel) {
        measure(index(param), nullptr);
      }
    }
  });
  if (weights_) {
    const auto present = [&](ParamId param) { return gradients_[index(param)].present; };
    std::vector<ChunkId> chunks;
    for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
      const ChunkId chunk{static_cast<std::uint32_t>(i)};
      const auto& params = layout_.chunk(chunk).params;
      if (stored(chunk) && std::any_of(params.begin(), params.end(), present)) {
        chunks.push_back(chunk);
      }
    }
    weights_->read_gradients(chunks, [&](ChunkId chunk, const std::byte* data) {
      for (const ParamId param : layout_.chunk(chunk).params) {
        const ParamSpec& spec = layout_.param(param);
        if (present(param)) {
          measure_at(param, data + layout_.place(param).offset * size_of(spec.type),
                     spec.numel >= kParallelNumel ? executor_.get() : nullptr);
        }
      }
    });
  }
  double sum = 0.0;
  for (const double square : squares) {
    sum += square;
  }
  return std::sqrt(sum);
}

void Session::scale_gradients(double factor) {
  own_device_.follow_stream();
  for (Gradient& gradient : gradients_) {
    if (gradient.present) {
      const at::NoGradGuard no_grad;
      gradient.view.mul_(factor);
      gradient.version = version_of(gradient.view);
    }
  }
}

}  // namespace castor
