#include "torch/session.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/units.h"
#include "host/host_arena.h"
#include "host/slot_arena.h"
#include "parallel/async_copy_engine.h"
#include "parallel/tbb_executor.h"
#include "torch/counting_allocator.h"
#include "torch/gil.h"
#include "torch/torch_copy_engine.h"
#include "torch/torch_error.h"

namespace castor {
namespace {

constexpr ModuleId kRoot{0};

const std::string kInChild =
    "this process was forked from the one that boosted the model, which keeps the memory of its "
    "parameters, gradients and optimizer states to itself; compute with them there, give the child "
    "a .clone() made before the fork, or start it with the 'spawn' method";

std::uint64_t monotonic_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

/// Runs after AccumulateGrad of one parameter, beside any hooks of the user.
class GradientHook final : public ::torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::weak_ptr<Session> session, ParamId param)
      : session_(std::move(session)), param_(param) {}

  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& outputs,
      const ::torch::autograd::variable_list& inputs) override {
    if (const auto session = session_.lock()) {
      for_torch([&] { session->gradient_arrived(param_, inputs.at(0)); });
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
                                std::vector<std::string> names, const std::vector<bool>& trained,
                                ScalarType precision) {
  if (params.size() != names.size() || params.size() != trained.size()) {
    throw InvalidArgument("there are " + std::to_string(params.size()) + " parameters but " +
                          std::to_string(names.size()) + " names and " +
                          std::to_string(trained.size()) + " marks of what is trained");
  }
  std::vector<ParamSpec> specs;
  specs.reserve(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    specs.push_back(
        {std::move(names[i]), static_cast<std::size_t>(params[i].numel()), precision, trained[i]});
  }
  return specs;
}

/// At memory speed a copy is over soonest when every core takes part; a link leaves the cores free.
std::unique_ptr<CopyEngine> make_copy_engine(const SessionOptions& options) {
  if (options.backend) {
    return options.backend->make_copy_engine();
  }
  if (options.link_bytes_per_second == 0) {
    return std::make_unique<TorchCopyEngine>();
  }
  return std::make_unique<AsyncCopyEngine>(
      AsyncCopyOptions{.bytes_per_second = options.link_bytes_per_second, .copy = {}});
}

std::unique_ptr<Arena> make_device_arena(const SessionOptions& options) {
  return options.backend ? options.backend->make_device_arena()
                         : std::make_unique<SlotArena>(make_host_arena());
}

std::unique_ptr<Arena> make_home_arena(const SessionOptions& options) {
  return options.backend ? options.backend->make_host_arena() : make_host_arena();
}

void share_with_children(const ChunkManager& manager, std::size_t num_chunks) {
  for (std::size_t i = 0; i < num_chunks * kNumPayloadKinds; ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i / kNumPayloadKinds)};
    if (const auto& payload =
            manager.payload(chunk, static_cast<PayloadKind>(i % kNumPayloadKinds))) {
      payload->share_with_children();
    }
  }
}

}  // namespace

std::shared_ptr<Session> Session::create(std::vector<at::Tensor> params,
                                         std::vector<std::string> param_names,
                                         const std::vector<bool>& trained,
                                         std::vector<ModuleSpec> modules,
                                         const SessionOptions& options,
                                         std::span<const ParamId> valueless) {
  const at::NoGradGuard no_grad;
  auto specs = describe(params, std::move(param_names), trained, options.precision);
  LayoutOptions layout_options = options.layout;
  layout_options.param_alignment = param_alignment(options.state.format, options.precision);
  ChunkLayout layout(std::move(specs), std::move(modules), layout_options);
  std::vector<Placement> placements = place_chunks(layout, options.placement);
  // Not make_shared: the constructor is private, and the destructor waits for copies and updates.
  std::shared_ptr<Session> session(
      new Session(std::move(params), std::move(layout), std::move(placements), options),
      [](const Session* ended) {
        const GilRelease released;
        delete ended;
      });
  session->adopt_parameters(valueless);
  session->install_gradient_hooks();
  session->watch_tensors();
  if (!options.backend) {
    install_counting_allocator();
  }
  return session;
}

Session::Session(std::vector<at::Tensor> params, ChunkLayout layout,
                 std::vector<Placement> placements, const SessionOptions& options)
    : params_(std::move(params)),
      layout_(std::move(layout)),
      overlap_(options.overlap),
      scaled_precision_(options.precision == ScalarType::kFloat16),
      own_device_(options.backend),
      device_(std::make_shared<MemoryTier>(TierKind::kDevice, options.device_bytes,
                                           make_device_arena(options), own_device_.stream())),
      host_(std::make_shared<MemoryTier>(TierKind::kHost, options.host_bytes,
                                         make_home_arena(options))),
      nonmodel_(std::make_shared<NonModelMemory>(device_)),
      charged_(own_device_ ? nullptr : nonmodel_),
      executor_(std::make_unique<TbbExecutor>()),
      copy_engine_(make_copy_engine(options)),
      storages_(std::make_unique<ChunkStorages>(layout_, own_device_.torch_device())),
      weights_(StoredWeights::create(layout_, placements, *storages_, options.state, *host_,
                                     *executor_, own_device_)),
      manager_(std::make_unique<ChunkManager>(layout_, std::move(placements), device_, host_,
                                              *copy_engine_, *storages_, weights_.get())) {
  add_gradient_payloads();
  OptimizerStateOptions state_options = options.state;
  state_options.device = own_device_.get();
  optimizer_state_ = std::make_unique<OptimizerState>(*manager_, params_, *executor_, state_options,
                                                      weights_.get());
  storages_->on_write_back([this](ChunkId chunk, const std::byte* home, const std::byte* slot) {
    const auto scope = own_device_.run_on_stream();  // an eviction may come from any thread
    optimizer_state_->before_write_back(chunk, home, slot);
  });
  if (copy_engine_->asynchronous()) {
    std::optional<GradientCopies::Account> account;
    if (own_device_) {
      account.emplace(*nonmodel_, *own_device_.get());
    }
    gradient_copies_ = std::make_unique<GradientCopies>(layout_, *copy_engine_, *device_, account);
  }
  RuntimeOptions runtime_options = options.runtime;
  runtime_options.freed_slots =
      own_device_ ? FreedSlots::kReusedAtOnce : FreedSlots::kKeepTheirBytes;
  runtime_ = std::make_unique<Runtime>(*manager_, nonmodel_, runtime_options,
                                       Runtime::Clock(monotonic_ns));
  own_device_.follow(nonmodel_);
  if (options.overlap != Overlap::kNone) {
    updates_ = std::make_unique<UpdateQueue>(layout_.chunks().size());
    manager_->follow(updates_.get());
  }
}

Session::~Session() {
  if (updates_) {
    updates_->abandon();  // returns when none is under way
  }
  share_with_children(*manager_, layout_.chunks().size());  // what outlives the session
  gate_.reset();
  gradient_copies_.reset();
  runtime_.reset();
  std::vector<std::shared_ptr<Payload>> homes;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    homes.push_back(manager_->payload(ChunkId{static_cast<std::uint32_t>(i)}, PayloadKind::kParam));
  }
  own_device_.leave(homes);  // before payloads go that a promotion has read, and after the last
  manager_.reset();          // slots have gone home
  weights_.reset();
  own_device_.leave(homes);
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
void Session::adopt_parameters(std::span<const ParamId> valueless) {
  std::vector<bool> has_values(params_.size(), true);
  for (const ParamId param : valueless) {
    has_values[index(param)] = false;
  }
  std::vector<c10::Storage> grad_storages;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    storages_->bind(chunk, manager_->payload(chunk, PayloadKind::kParam)->data());
    const auto& grad = manager_->payload(chunk, PayloadKind::kGrad);
    grad_storages.push_back(!grad           ? c10::Storage()
                            : stored(chunk) ? weights_->gradient_storage(chunk)
                                            : storage_over(grad, own_device_.torch_device()));
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
    gradients_[i].required = params_[i].requires_grad();
    if (has_values[i]) {
      optimizer_state_->adopt(param, params_[i]);
    }
    params_[i].set_data(home);
    if (trainable(param)) {
      gradients_[i].view =
          tensor_over(grad_storages[index(place.chunk)], to_torch(type), place.offset, geometry);
    }
  }
  storages_->watch(params_);
}

void Session::watch_tensors() {
  gate_ = TensorGate::create(
      2 * layout_.chunks().size(), [this](std::size_t group) { settle_group(group); },
      [weak = weak_from_this()](auto uses) {
        const auto session = weak.lock();  // an operator may be the last that uses the model
        return session ? session->visit_groups(uses) : nullptr;
      });
  guard_weights();
  state_views_ = std::make_unique<StateViews>(params_.size());
  updated_.resize(layout_.chunks().size(), false);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ChunkId chunk = layout_.place(ParamId{static_cast<std::uint32_t>(i)}).chunk;
    gate_->watch(index(chunk), params_[i]);
    if (gradients_[i].view.defined()) {
      gate_->watch(gradient_group(chunk), gradients_[i].view);
    }
  }
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const ParamId first = layout_.chunk(chunk).params.front();
    const at::Tensor& gradient = gradients_[index(first)].view;
    param_uses_.push_back(storages_->storage(chunk).use_count());
    gradient_uses_.push_back(gradient.defined() ? gradient.storage().use_count() : 0);
  }
}

std::size_t Session::gradient_group(ChunkId chunk) const noexcept {
  return layout_.chunks().size() + index(chunk);
}

void Session::settle_group(std::size_t group) {
  const ChunkId chunk{static_cast<std::uint32_t>(group % layout_.chunks().size())};
  if (updated_[index(chunk)]) {
    check_no_update_yet(group == index(chunk) ? "a weight or moment was read"
                                              : "a gradient was read or changed");
  }
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
    if (params_[i].requires_grad() != gradients_[i].required) {
      throw UsageError("parameter '" + spec.name +
                       "' had requires_grad=" + (gradients_[i].required ? "True" : "False") +
                       " when the model was boosted and has " +
                       (gradients_[i].required ? "False" : "True") +
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

void Session::stay_with_parent() {
  in_child_ = true;
  const auto leave = [](const c10::Storage& storage) { forbid(storage, kInChild); };
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    leave(storages_->storage(ChunkId{static_cast<std::uint32_t>(i)}));
  }
  for (const Gradient& gradient : gradients_) {
    if (gradient.view.defined()) {
      leave(gradient.view.storage());
    }
  }
  state_views_->for_each_storage(leave);
}

void Session::check_process() const {
  if (in_child_) {
    throw UsageError(kInChild);
  }
}

void Session::enter(ModuleId module) {
  check_process();
  own_device_.follow_stream();
  const bool training = at::GradMode::is_enabled();
  if (module == kRoot && training && ::torch::autograd::get_current_graph_task_id() == -1) {
    check_parameters();
    check_whole();
    check_no_update_yet("the next forward began");
  }
  if (runtime_->idle() && charged_account() != charged_) {
    account_before_ = charged_account();
    charge_allocations_to(charged_);
  }
  notice_new_operators();
  check_not_updated(module);
  runtime_->enter(module, training ? PassMode::kTraining : PassMode::kInference);
  for (const ChunkId chunk : layout_.chunks_of(module)) {
    gate_->open(index(chunk));
  }
}

void Session::exit(ModuleId module) {
  if (in_child_) {
    return;  // enter has thrown
  }
  if (!runtime_->idle()) {  // else enter has thrown, and said why
    own_device_.follow_stream();
  }
  runtime_->exit(module);
  if (!at::GradMode::is_enabled() && runtime_->idle()) {
    charge_allocations_to(std::exchange(account_before_, nullptr));
  }
}

void Session::enter_backward(ModuleId module) {
  own_device_.follow_stream();
  charge_allocations_to(charged_);
  follow_backward_pass();
  check_not_updated(module);
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
  if (!in_child_ && runtime_->idle() && charged_account() == charged_) {
    charge_allocations_to(nullptr);
  }
}

std::vector<at::Tensor> Session::moments(ParamId param) {
  return state_views_->of(param, *optimizer_state_, *gate_, index(layout_.place(param).chunk))
      .moments;
}

std::optional<at::Tensor> Session::moment_scales(ParamId param) {
  return state_views_->of(param, *optimizer_state_, *gate_, index(layout_.place(param).chunk))
      .scales;
}

}  // namespace castor
