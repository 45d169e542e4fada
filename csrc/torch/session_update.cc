#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "optim/gradient.h"
#include "torch/counting_allocator.h"
#include "torch/session.h"

// The part of Session between a gradient's arrival and the end of its parameter's update.
namespace castor {
namespace {

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

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
  const std::uint64_t start_ns = runtime_->clock_ns();
  if (leaves_device && gradient_copies_ && grad.storage().use_count() <= max_uses &&
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
  if (runtime_->grad_ready(param, copy) && !armed_groups_.empty()) {
    completed_.push_back(layout_.place(param).chunk);
    update_completed_chunks();
  }
}

void Session::arm_updates(std::vector<AdamOptions> groups, std::vector<std::int64_t> group_of) {
  if (overlap_ == Overlap::kBackward) {
    check_groups(groups.size(), group_of);
    armed_groups_ = std::move(groups);
    armed_group_of_ = std::move(group_of);
  }
}

void Session::update_completed_chunks() {
  std::erase_if(completed_, [this](ChunkId chunk) {
    if (aliased(chunk)) {
      return true;  // an alias may be read in what is left of backward: step() updates the chunk
    }
    if (!runtime_->retire(chunk)) {
      return false;
    }
    std::vector<AdamSegment> segments;
    for (const ParamId param : layout_.chunk(chunk).params) {
      const auto group = static_cast<std::size_t>(armed_group_of_[index(param)]);
      segments.push_back(begin_step(index(param), armed_groups_[group], 1.0));
    }
    updated_[index(chunk)] = true;
    submit_update(chunk, std::move(segments));
    return true;
  });
}

void Session::check_no_update_yet(const std::string& what) const {
  const auto num_updated = std::count(updated_.begin(), updated_.end(), true);
  if (num_updated > 0) {
    throw UsageError(what + " after a backward that updated " + std::to_string(num_updated) +
                     " of " + std::to_string(layout_.chunks().size()) +
                     " chunks, and optimizer.step() was not called: with overlap=\"backward\" the "
                     "weights are between two steps then. Call step() after every backward; to "
                     "accumulate gradients use overlap=\"forward\"; after a backward that failed, "
                     "load a checkpoint");
  }
}

void Session::check_not_updated(ModuleId module) const {
  for (const ChunkId chunk : layout_.chunks_of(module)) {
    if (updated_[index(chunk)]) {
      check_no_update_yet("module '" + layout_.module(module).name + "' ran");
    }
  }
}

bool Session::aliased(ChunkId chunk) const {
  const auto in_use = [](const at::Tensor& tensor) { return tensor.storage().use_count() > 1; };
  const auto& params = layout_.chunk(chunk).params;
  const at::Tensor& gradient = gradients_[index(params.front())].view;
  return storages_->storage(chunk).use_count() > param_uses_[index(chunk)] ||
         (gradient.defined() && gradient.storage().use_count() > gradient_uses_[index(chunk)]) ||
         std::any_of(params.begin(), params.end(), [&](ParamId param) {
           const StateViews& views = state_views_[index(param)];
           return std::any_of(views.moments.begin(), views.moments.end(), in_use) ||
                  (views.scales && in_use(*views.scales));
         });
}

void Session::forget_updates() {
  std::fill(updated_.begin(), updated_.end(), false);
  armed_groups_.clear();
  completed_.clear();
}

void Session::abandon_step() {
  forget_updates();
  settle();
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
  summary.norm = with_norm ? gradient_norm() : 0.0;
  return summary;
}

double Session::gradient_norm() const {
  constexpr std::size_t kParallelNumel = std::size_t{1} << 18;
  std::vector<double> squares(params_.size(), 0.0);
  const auto measure = [&](std::size_t i, Executor* executor) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    squares[i] = copy_and_square_norm(executor, nullptr,
                                      optimizer_state_->element(param, PayloadKind::kGrad),
                                      layout_.param(param).numel, layout_.param(param).type);
  };
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (gradients_[i].present && layout_.params()[i].numel >= kParallelNumel) {
      measure(i, executor_.get());
    }
  }
  executor_->parallel_for(layout_.chunks().size(), [&](std::size_t chunk) {
    for (const ParamId param : layout_.chunks()[chunk].params) {
      if (gradients_[index(param)].present && layout_.param(param).numel < kParallelNumel) {
        measure(index(param), nullptr);
      }
    }
  });
  double sum = 0.0;
  for (const double square : squares) {
    sum += square;
  }
  return std::sqrt(sum);
}

void Session::scale_gradients(double factor) {
  for (Gradient& gradient : gradients_) {
    if (gradient.present) {
      const at::NoGradGuard no_grad;
      gradient.view.mul_(factor);
      gradient.version = version_of(gradient.view);
    }
  }
}

void Session::adam_step(std::span<const AdamOptions> groups, std::span<const std::int64_t> group_of,
                        double grad_scale) {
  check_groups(groups.size(), group_of);
  std::vector<std::vector<AdamSegment>> segments(layout_.chunks().size());
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const auto group = static_cast<std::size_t>(group_of[i]);
    if (updated(param)) {
      check_used_gradient(i, groups[group]);
    } else if (gradients_[i].present) {
      segments[index(layout_.place(param).chunk)].push_back(
          begin_step(i, groups[group], grad_scale));
    }
  }
  update(std::move(segments));
}

void Session::check_groups(std::size_t num_groups, std::span<const std::int64_t> group_of) const {
  if (group_of.size() != params_.size()) {
    throw InvalidArgument("group_of has " + std::to_string(group_of.size()) + " entries for " +
                          std::to_string(params_.size()) + " parameters");
  }
  for (const std::int64_t group : group_of) {
    if (group < 0 || static_cast<std::size_t>(group) >= num_groups) {
      throw InvalidArgument("group_of names group " + std::to_string(group) + " of " +
                            std::to_string(num_groups));
    }
  }
}

// The update is over or under way: it has to be the one that step() would make now.
void Session::check_used_gradient(std::size_t i, const AdamOptions& options) const {
  const Gradient& gradient = gradients_[i];
  const auto refuse = [&](const std::string& what) {
    throw UsageError(what +
                     " between backward and step(), but overlap=\"backward\" has updated "
                     "parameter '" +
                     layout_.params()[i].name +
                     "' in backward already; change it before the forward, or use "
                     "overlap=\"forward\"");
  };
  if (!gradient.present || gradient.version != version_of(gradient.view)) {
    refuse("its gradient was changed");
  }
  if (options != armed_groups_[static_cast<std::size_t>(armed_group_of_[i])]) {
    refuse("an option of its parameter group was changed");
  }
}

AdamSegment Session::begin_step(std::size_t i, const AdamOptions& options, double grad_scale) {
  auto* steps = steps_.data_ptr<float>();
  const auto step = static_cast<std::int64_t>(steps[i]) + 1;
  AdamSegment segment =
      optimizer_state_->segment(ParamId{static_cast<std::uint32_t>(i)}, options, step, grad_scale);
  steps[i] = static_cast<float>(step);
  // As torch's in-place update does: a graph that saved the old weights must not be replayed.
  params_[i].unsafeGetTensorImpl()->bump_version();
  return segment;
}

// In the order of the chunks, which is the order in which the next forward needs them.
void Session::update(std::vector<std::vector<AdamSegment>> segments) {
  if (!updates_) {
    std::vector<AdamSegment> all;
    all.reserve(params_.size());
    for (const auto& of_chunk : segments) {
      all.insert(all.end(), of_chunk.begin(), of_chunk.end());
    }
    adam_update(*executor_, all);
    return;
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (!segments[i].empty()) {
      submit_update(ChunkId{static_cast<std::uint32_t>(i)}, std::move(segments[i]));
    }
  }
}

void Session::submit_update(ChunkId chunk, std::vector<AdamSegment> segments) {
  gate_->close(index(chunk));
  gate_->close(gradient_group(chunk));
  const CopyTicket gradients =
      gradient_copies_ ? gradient_copies_->last_of(chunk) : CopyTicket::kNone;
  updates_->submit(chunk, [this, gradients, of_chunk = std::move(segments)] {
    copy_engine_->wait(gradients);
    adam_update(*executor_, of_chunk);
  });
  if (aliased(chunk)) {
    updates_->wait(chunk);  // nothing would hold its readers back
  }
}

void Session::finish_step() {
  forget_updates();
  runtime_->finish_step();
  account_before_.reset();
  if (charged_account() == nonmodel_) {
    charge_allocations_to(nullptr);
  }
  place_chunks_again();
}

void Session::settle() {
  if (updates_) {
    updates_->drain();
  }
  gate_->pass_all();
}

void Session::settle(ParamId param) { gate_->pass(index(layout_.place(param).chunk)); }

void Session::send_home() {
  check_no_update_yet("the weights are read");
  settle();
  runtime_->send_home();
}

}  // namespace castor
