#include "torch/session.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/units.h"
#include "host/host_arena.h"
#include "host/slot_arena.h"
#include "optim/gradient.h"
#include "parallel/async_copy_engine.h"
#include "parallel/parallel_copy_engine.h"
#include "parallel/tbb_executor.h"
#include "torch/counting_allocator.h"
#include "torch/torch_error.h"

namespace castor {
namespace {

constexpr ModuleId kRoot{0};

std::uint64_t monotonic_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

/// Runs after AccumulateGrad of one parameter, beside any hooks of the user.
class GradientHook final : public ::torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::weak_ptr<Session> session, ParamId param)
      : session_(std::move(session)), param_(param) {}

  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& outputs,
      const ::torch::autograd::variable_list& /*inputs*/) override {
    if (const auto session = session_.lock()) {
      for_torch([&] { session->gradient_arrived(param_); });
    }
    return outputs;
  }

 private:
  std::weak_ptr<Session> session_;
  ParamId param_;
};

/// Lives as long as one backward pass.
class BackwardPassEnd {
 public:
  BackwardPassEnd(std::weak_ptr<Session> session, int pass)
      : session_(std::move(session)), pass_(pass) {}
  ~BackwardPassEnd() {
    if (const auto session = session_.lock()) {
      session->backward_pass_ended(pass_);
    }
  }
  BackwardPassEnd(const BackwardPassEnd&) = delete;
  BackwardPassEnd& operator=(const BackwardPassEnd&) = delete;

 private:
  std::weak_ptr<Session> session_;
  int pass_;
};

std::vector<ParamSpec> describe(const std::vector<at::Tensor>& params,
                                std::vector<std::string> names, ScalarType precision) {
  if (params.size() != names.size()) {
    throw InvalidArgument("there are " + std::to_string(params.size()) + " parameters but " +
                          std::to_string(names.size()) + " names");
  }
  std::vector<ParamSpec> specs;
  specs.reserve(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    specs.push_back({std::move(names[i]), static_cast<std::size_t>(params[i].numel()), precision,
                     params[i].requires_grad()});
  }
  return specs;
}

/// At memory speed a copy is over soonest when every core takes part; a link leaves the cores free.
std::unique_ptr<CopyEngine> make_copy_engine(std::uint64_t link_bytes_per_second,
                                             Executor& executor) {
  if (link_bytes_per_second == 0) {
    return std::make_unique<ParallelCopyEngine>(executor);
  }
  return std::make_unique<AsyncCopyEngine>(
      AsyncCopyOptions{.bytes_per_second = link_bytes_per_second, .copy = {}});
}

}  // namespace

std::shared_ptr<Session> Session::create(std::vector<at::Tensor> params,
                                         std::vector<std::string> param_names,
                                         std::vector<ModuleSpec> modules,
                                         const SessionOptions& options) {
  const at::NoGradGuard no_grad;
  auto specs = describe(params, std::move(param_names), options.precision);
  LayoutOptions layout_options = options.layout;
  layout_options.param_alignment = param_alignment(options.state.format, options.precision);
  ChunkLayout layout(std::move(specs), std::move(modules), layout_options);
  // Not make_shared: the constructor is private.
  std::shared_ptr<Session> session(new Session(std::move(params), std::move(layout), options));
  session->adopt_parameters();
  session->install_gradient_hooks();
  session->watch_tensors();
  install_counting_allocator();
  return session;
}

Session::Session(std::vector<at::Tensor> params, ChunkLayout layout, const SessionOptions& options)
    : params_(std::move(params)),
      layout_(std::move(layout)),
      overlap_(options.overlap),
      scaled_precision_(options.precision == ScalarType::kFloat16),
      device_(std::make_shared<MemoryTier>(TierKind::kDevice, options.device_bytes,
                                           std::make_unique<SlotArena>(make_host_arena()))),
      host_(std::make_shared<MemoryTier>(TierKind::kHost, options.host_bytes, make_host_arena())),
      nonmodel_(std::make_shared<NonModelMemory>(device_)),
      executor_(std::make_unique<TbbExecutor>()),
      copy_engine_(make_copy_engine(options.link_bytes_per_second, *executor_)),
      storages_(std::make_unique<ChunkStorages>(layout_)),
      manager_(std::make_unique<ChunkManager>(layout_, place_chunks(layout_, options.placement),
                                              device_, host_, *copy_engine_, *storages_)) {
  add_gradient_payloads();
  optimizer_state_ =
      std::make_unique<OptimizerState>(*manager_, params_, *executor_, options.state);
  storages_->on_write_back([state = optimizer_state_.get()](ChunkId chunk, const std::byte* home,
                                                            const std::byte* slot) {
    state->before_write_back(chunk, home, slot);
  });
  if (copy_engine_->asynchronous()) {
    gradient_copies_ = std::make_unique<GradientCopies>(layout_, *copy_engine_, *device_);
  }
  runtime_ = std::make_unique<Runtime>(*manager_, nonmodel_, options.runtime,
                                       Runtime::Clock(monotonic_ns));
  if (options.overlap != Overlap::kNone) {
    updates_ = std::make_unique<UpdateQueue>(layout_.chunks().size());
    manager_->follow(updates_.get());
  }
}

Session::~Session() {
  if (updates_) {
    manager_->follow(nullptr);
    updates_.reset();  // completes what is under way
  }
  gate_.reset();
  gradient_copies_.reset();
  runtime_.reset();
  std::vector<std::shared_ptr<Payload>> homes;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    homes.push_back(manager_->payload(ChunkId{static_cast<std::uint32_t>(i)}, PayloadKind::kParam));
  }
  manager_.reset();
  storages_->release_to_homes(homes);
}

void Session::add_gradient_payloads() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (layout_.chunk(chunk).trainable) {
      manager_->add_payload(chunk, PayloadKind::kGrad, layout_.chunk(chunk).used_bytes);
    }
  }
}

// Nothing here allocates payload memory: once the first parameter moves, all will.
void Session::adopt_parameters() {
  std::vector<c10::Storage> grad_storages;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    storages_->bind(chunk, manager_->payload(chunk, PayloadKind::kParam)->data());
    const auto& grad = manager_->payload(chunk, PayloadKind::kGrad);
    grad_storages.push_back(grad ? storage_over(grad) : c10::Storage());
  }
  gradients_.resize(params_.size());
  steps_ = at::zeros({static_cast<std::int64_t>(params_.size())}, at::kFloat);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const ParamPlace place = layout_.place(param);
    const ScalarType type = layout_.param(param).type;
    const ParamGeometry geometry = geometry_of(params_[i]);
    const at::Tensor home =
        tensor_over(storages_->storage(place.chunk), to_torch(type), place.offset, geometry);
    optimizer_state_->adopt(param, params_[i]);
    params_[i].set_data(home);
    if (trainable(param)) {
      gradients_[i].view =
          tensor_over(grad_storages[index(place.chunk)], to_torch(type), place.offset, geometry);
    }
  }
  storages_->watch(params_);
}

void Session::watch_tensors() {
  gate_ = TensorGate::create(2 * layout_.chunks().size(),
                             [this](std::size_t group) { settle_group(group); });
  state_views_.resize(params_.size());
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ChunkId chunk = layout_.place(ParamId{static_cast<std::uint32_t>(i)}).chunk;
    gate_->watch(index(chunk), params_[i]);
    if (gradients_[i].view.defined()) {
      gate_->watch(gradient_group(chunk), gradients_[i].view);
    }
  }
}

void Session::settle_group(std::size_t group) {
  const ChunkId chunk{static_cast<std::uint32_t>(group % layout_.chunks().size())};
  if (gradient_copies_ && group == gradient_group(chunk)) {
    gradient_copies_->wait(chunk);
  }
  if (updates_) {
    updates_->wait(chunk);
  }
}

void Session::install_gradient_hooks() {
  accumulators_.resize(params_.size());
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    if (trainable(param)) {
      // Held here: a leaf refers to its accumulator weakly.
      accumulators_[i] = ::torch::autograd::impl::grad_accumulator(params_[i]);
      accumulators_[i]->add_post_hook(std::make_unique<GradientHook>(weak_from_this(), param));
    }
  }
}

void Session::check_parameters() const {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const ParamSpec& spec = layout_.param(param);
    if (params_[i].requires_grad() != spec.trainable) {
      throw UsageError(
          "parameter '" + spec.name + "' had requires_grad=" + (spec.trainable ? "True" : "False") +
          " when the model was boosted and has " + (spec.trainable ? "False" : "True") +
          " now; set it before booster.boost, which lays out gradients and optimizer "
          "state for the trainable parameters");
    }
    if (params_[i].storage().unsafeGetStorageImpl() !=
        storages_->storage(layout_.place(param).chunk).unsafeGetStorageImpl()) {
      throw UsageError("parameter '" + spec.name +
                       "' was given other memory after booster.boost (by model.to(), .half(), "
                       "param.data = ...); write into it in place instead: param.copy_(values)");
    }
  }
}

void Session::enter(ModuleId module) {
  const bool training = at::GradMode::is_enabled();
  if (module == kRoot && training && ::torch::autograd::get_current_graph_task_id() == -1) {
    check_parameters();
    check_no_update_yet("the next forward began");
  }
  if (runtime_->idle() && charged_account() != nonmodel_) {
    account_before_ = charged_account();
    charge_allocations_to(nonmodel_);
  }
  runtime_->enter(module, training ? PassMode::kTraining : PassMode::kInference);
  for (const ChunkId chunk : layout_.chunks_of(module)) {
    gate_->open(index(chunk));
  }
}

void Session::exit(ModuleId module) {
  runtime_->exit(module);
  if (!at::GradMode::is_enabled() && runtime_->idle()) {
    charge_allocations_to(std::exchange(account_before_, nullptr));
  }
}

void Session::enter_backward(ModuleId module) {
  charge_allocations_to(nonmodel_);
  follow_backward_pass();
  runtime_->enter_backward(module);
  update_completed_chunks();
}

// What the thread allocates after backward (the next micro-batch's data, a user's clipping on the
// host) is not the model's. Autograd drops the callback with the pass, also when the pass failed.
void Session::follow_backward_pass() {
  const int pass = ::torch::autograd::get_current_graph_task_id();
  if (pass == -1 ||
      std::find(backward_passes_.begin(), backward_passes_.end(), pass) != backward_passes_.end()) {
    return;
  }
  backward_passes_.push_back(pass);
  auto end = std::make_shared<BackwardPassEnd>(weak_from_this(), pass);
  ::torch::autograd::Engine::get_default_engine().queue_callback([end = std::move(end)] {});
}

void Session::backward_pass_ended(int pass) {
  backward_passes_.erase(std::find(backward_passes_.begin(), backward_passes_.end(), pass),
                         backward_passes_.end());
  if (backward_passes_.empty()) {
    stop_charging();
  }
}

void Session::stop_charging() {
  if (runtime_->idle() && charged_account() == nonmodel_) {
    charge_allocations_to(nullptr);
  }
}

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

GradientCopy Session::adopt_gradient(ParamId param, at::Tensor& grad) {
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
  const std::uint64_t start_ns = monotonic_ns();
  if (leaves_device && gradient_copies_ &&
      gradient_copies_->submit(
          chunk, grad, gradient.view,
          {optimizer_state_->element(param, PayloadKind::kGrad), gradient.view.nbytes()})) {
    gate_->close(gradient_group(chunk));
  } else {
    gradient.view.copy_(grad);
  }
  const std::uint64_t end_ns = monotonic_ns();
  grad = gradient.view;
  if (!leaves_device) {
    return {};
  }
  gradient_bytes_moved_ += gradient.view.nbytes();
  return {.bytes = gradient.view.nbytes(), .start_ns = start_ns, .end_ns = end_ns};
}

void Session::gradient_arrived(ParamId param) {
  follow_backward_pass();
  at::Tensor& grad = params_[index(param)].mutable_grad();
  Gradient& gradient = gradients_[index(param)];
  if (!grad.defined()) {
    return;
  }
  if (gradient.used) {
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
    copy = adopt_gradient(param, grad);
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
    if (!runtime_->retire(chunk)) {
      return false;
    }
    std::vector<AdamSegment> segments;
    for (const ParamId param : layout_.chunk(chunk).params) {
      const auto group = static_cast<std::size_t>(armed_group_of_[index(param)]);
      segments.push_back(begin_step(index(param), armed_groups_[group], 1.0));
      gradients_[index(param)].used = true;
    }
    ++num_updated_;
    submit_update(chunk, std::move(segments));
    return true;
  });
}

void Session::check_no_update_yet(const std::string& what) const {
  if (num_updated_ > 0) {
    throw UsageError(what + " after a backward that updated " + std::to_string(num_updated_) +
                     " of " + std::to_string(layout_.chunks().size()) +
                     " chunks, and optimizer.step() was not called: with overlap=\"backward\" the "
                     "weights are between two steps then. Call step() after every backward; to "
                     "accumulate gradients use overlap=\"forward\"; after a backward that failed, "
                     "load a checkpoint");
  }
}

void Session::forget_updates() {
  armed_groups_.clear();
  completed_.clear();
  num_updated_ = 0;
  for (Gradient& gradient : gradients_) {
    gradient.used = false;
  }
}

void Session::abandon_step() {
  settle();
  forget_updates();
}

// Of the chunks that backward has not updated; those are used already, and may still be under way.
void Session::await_gradients() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const auto& params = layout_.chunks()[i].params;
    if (std::none_of(params.begin(), params.end(),
                     [&](ParamId param) { return gradients_[index(param)].used; })) {
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
      adopt_gradient(param, grad);
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
    const auto group = static_cast<std::size_t>(group_of[i]);
    if (gradients_[i].used) {
      check_used_gradient(i, groups[group]);
    } else if (gradients_[i].present) {
      const ParamId param{static_cast<std::uint32_t>(i)};
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
}

void Session::finish_step() {
  forget_updates();
  runtime_->finish_step();
  account_before_.reset();
  if (charged_account() == nonmodel_) {
    charge_allocations_to(nullptr);
  }
}

void Session::settle() {
  if (updates_) {
    updates_->drain();
  }
  for (std::size_t group = 0; group < 2 * layout_.chunks().size(); ++group) {
    gate_->pass(group);
  }
}

void Session::settle(ParamId param) { gate_->pass(index(layout_.place(param).chunk)); }

void Session::send_home() {
  check_no_update_yet("the weights are read");
  settle();
  runtime_->send_home();
}

const Session::StateViews& Session::state_views(ParamId param) {
  StateViews& views = state_views_[index(param)];
  if (views.moments.empty()) {
    views.moments = optimizer_state_->moments(param);
    views.scales = optimizer_state_->moment_scales(param);
    const std::size_t group = index(layout_.place(param).chunk);
    for (const at::Tensor& moment : views.moments) {
      gate_->watch(group, moment);
    }
    if (views.scales) {
      gate_->watch(group, *views.scales);
    }
  }
  return views;
}

std::vector<at::Tensor> Session::moments(ParamId param) { return state_views(param).moments; }

std::optional<at::Tensor> Session::moment_scales(ParamId param) {
  return state_views(param).scales;
}

}  // namespace castor
