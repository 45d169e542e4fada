#include "torch/session.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "store/nonmodel_account.h"
#include "store/tensor_errors.h"
#include "torch/gil.h"
#include "torch/torch_autograd.h"
#include "torch/torch_error.h"
#include "torch/uses.h"

namespace castor {
namespace {

constexpr ModuleId kRoot{0};

ScalarType own_type(const at::Tensor& param) {
  for (const ScalarType type :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16, ScalarType::kUInt8}) {
    if (to_torch(type) == param.scalar_type()) {
      return type;
    }
  }
  throw InvalidArgument(std::string("chunks hold no elements of type ") +
                        toString(param.scalar_type()));
}

std::vector<ParamHandle> handles(std::vector<at::Tensor> params) {
  std::vector<ParamHandle> handles;
  for (at::Tensor& param : params) {
    handles.push_back({.leaf = param, .local = std::move(param)});
  }
  return handles;
}

}  // namespace

std::shared_ptr<Session> Session::create(std::vector<at::Tensor> params,
                                         std::vector<std::string> param_names,
                                         const std::vector<bool>& trained,
                                         const std::vector<std::optional<ScalarType>>& types,
                                         std::vector<ModuleSpec> modules,
                                         const SessionOptions& options,
                                         std::span<const ParamId> valueless) {
  const at::NoGradGuard no_grad;
  check_counts({.params = params.size(),
                .names = param_names.size(),
                .trained = trained.size(),
                .types = types.size()});
  std::vector<ParamSpec> specs;
  for (std::size_t i = 0; i < params.size(); ++i) {
    specs.push_back({.name = std::move(param_names[i]),
                     .numel = static_cast<std::size_t>(params[i].numel()),
                     .type = types[i] ? *types[i] : own_type(params[i])});
  }
  SessionPlan plan = plan_session(std::move(specs), trained, std::move(modules), options);
  // Not make_shared: the constructor is private, and the destructor waits for copies and updates.
  const auto self = std::make_shared<std::weak_ptr<Session>>();
  std::shared_ptr<Session> session(new Session(std::move(params), std::move(plan), self),
                                   [](const Session* ended) {
                                     const GilRelease released;
                                     delete ended;
                                   });
  const std::vector<std::size_t> others = session->adopt_parameters(valueless);
  *self = session;
  session->watch_tensors(others);
  return session;
}

Session::Session(std::vector<at::Tensor> params, SessionPlan plan, const Self& self)
    : params_(handles(std::move(params))),
      entered_(plan.options.entered),
      memory_(std::move(plan.layout), plan.placements, plan.options),
      storages_(memory_.layout(), torch_device()),
      absent_gradients_(memory_.layout(), memory_.absent_gradients(), torch_device()),
      chunks_(memory_, std::move(plan.placements), plan.options,
              {.binder = storages_,
               .params = storages_,
               .gradients = absent_gradients_,
               .released =
                   [this](const auto& payloads) {
                     keep_apart(payloads);
                     storages_.release_to_host(payloads);
                   }}),
      gradients_(chunks_.manager(), params_, chunks_.weights(), chunks_.gradient_shards(),
                 absent_gradients_, memory_.executor(), memory_.device(),
                 plan.options.precision == ScalarType::kFloat16, chunks_.copies(),
                 *memory_.nonmodel(), memory_.rank_host_storage().gradients().tier),
      gate_(make_gate(self)),
      steps_(at::zeros({static_cast<std::int64_t>(params_.size())}, at::kFloat)),
      updates_(parts_of_updates(), plan.options),
      optimizer_state_(chunks_.manager(), memory_.shards(), updates_.states(), params_,
                       memory_.executor(), plan.options.state.rule, updates_.copies(),
                       updates_.ranks() ? &updates_.ranks()->states() : nullptr),
      param_memory_(memory_.layout(), params_, storages_, optimizer_state_,
                    [this](ParamId param) { return visit(param, false); }),
      state_views_(params_.size()),
      passes_(std::make_shared<Passes>(
          runtime(), memory_.device().computes_by_itself() ? nullptr : memory_.nonmodel(),
          torch_autograd())) {
  storages_.on_write_back([this](ChunkId chunk, const std::byte* host, const std::byte* slot) {
    const auto scope = memory_.device().run_on_stream();  // an eviction may come from any thread
    optimizer_state_.values().before_write_back(chunk, host, slot);
  });
  if (SessionRanks* const ranks = updates_.ranks()) {
    // A backward pass ends with the mean of its gradients, so that what looks at p.grad after it
    // sees what one process with all batches would.
    passes_->at_backward_end([this, ranks] {
      const GilRelease released;
      ranks->gradients().end_backward(*gate_);
    });
  }
  memory_.budgets()->follow_torch(
      *plan.options.backend, account_of(memory_.budgets()->tensors_of_torch(), plan.options.backend,
                                        [](const auto& work) { for_torch(work); }));
}

std::shared_ptr<TensorGate> Session::make_gate(const Self& self) {
  return TensorGate::create(
      2 * memory_.num_chunks(), [this](std::size_t group) { settle_group(group); },
      {.reads = [this](std::size_t group) { return updates_.read_by_save(group); },
       .await = [this](std::size_t group) { await_save(group); }},
      [self](auto uses) {
        const auto session = self->lock();  // an operator may be the last that uses the model
        return session ? session->visit_groups(uses) : nullptr;
      });
}

SessionUpdates::Parts Session::parts_of_updates() {
  return {.memory = memory_,
          .chunks = chunks_,
          .gradients = gradients_,
          .gate = *gate_,
          .steps = [this](ParamId param) -> float& {
            return steps_.mutable_data_ptr<float>()[index(param)];
          },
          // As torch's in-place update does: a graph that saved the old weights must not be
          // replayed.
          .replaced =
              [this](ParamId param) {
                params_[index(param)].local.unsafeGetTensorImpl()->bump_version();
              },
          .aliased =
              [this](ChunkId chunk) { return gradients_.aliased(chunk) || aliased_values(chunk); },
          .rebound = [this](ChunkId chunk) { return param_memory_.rebound(chunk); }};
}

Session::~Session() {
  updates_.end();
  gate_.reset();
  passes_->abandon();  // one may be under way: its end asks the ranks
  updates_.leave();
  chunks_.end();  // optimizer_state_ hears of what users have written on the device
}

// Gives tensors that outlive the session weights that no other rank writes, as far as the host has
// room for them.
void Session::keep_apart(std::span<const std::shared_ptr<Payload>> weights) const {
  const auto outlives = [this](ParamId param) {
    const ParamHandle& own = params_[index(param)];
    const std::size_t handles = own.leaf.is_same(own.local) ? 2 : 1;
    return uses_of(*own.local.unsafeGetTensorImpl()) > handles ||
           uses_of(storages_.storage(param)) > 2;  // this session's, and that tensor's
  };
  try {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (std::ranges::any_of(memory_.layout().chunks()[i].params, outlives)) {
        weights[i]->take_copy(Payload::CopyContents::kStorage);
      }
    }
  } catch (const OutOfMemory& error) {
    TORCH_WARN("weights that outlive a boosted model stay in memory that other ranks write: ",
               error.what());
  }
}

// Nothing here allocates payload memory: once the first parameter moves, all will. What else lies
// over a parameter's storage (a buffer, a state_dict) goes with it where the storage can.
std::vector<std::size_t> Session::adopt_parameters(std::span<const ParamId> valueless) {
  std::vector<bool> has_values(params_.size(), true);
  for (const ParamId param : valueless) {
    has_values[index(param)] = false;
  }
  for (std::size_t i = 0; i < memory_.num_chunks(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    storages_.bind(chunk, chunks_.manager().payload(chunk, PayloadKind::kParam)->data());
  }
  std::vector<at::Tensor> locals;
  std::vector<std::size_t> others(params_.size(), 0);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const at::Tensor& own = params_[i].local;
    if (has_values[i] && torch_device().is_cpu() && !chunks_.stored(layout().place(param).chunk) &&
        ParamMemory::fills_storage(own, to_torch(layout().param(param).type)) &&
        uses_of(own.storage()) > 1) {
      others[i] = uses_of(own.storage()) - 1;
      optimizer_state_.adopt(param, own);
      storages_.adopt(param, own.storage());
      locals.push_back(own);
      continue;
    }
    const at::Tensor host =
        tensor_over(storages_.storage(param), to_torch(layout().param(param).type), /*offset=*/0,
                    geometry_of(params_[i].local));
    if (has_values[i]) {
      optimizer_state_.adopt(param, params_[i].local);
    }
    params_[i].local.set_data(host);
    locals.push_back(params_[i].local);
  }
  storages_.watch(locals);
  return others;
}

void Session::watch_tensors(std::span<const std::size_t> others) {
  guard_weights();
  param_memory_.watch(*gate_, others);
  gradients_.open(runtime(), *gate_, weak_from_this());
  forbid_absent_addresses();  // all tensors are made
}

// From now on torch tells the address of what is not always in memory only while it is there.
void Session::forbid_absent_addresses() {
  const auto forbid_with = [](const std::string& message) {
    return [&message](const c10::Storage& storage) { forbid_null(storage, message); };
  };
  for (std::size_t i = 0; i < memory_.num_chunks(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (chunks_.stored(chunk)) {
      storages_.for_each(chunk, forbid_with(chunks_.no_address(chunk, PayloadKind::kParam)));
      storages_.point_at(chunk, nullptr);
    }
    if (chunks_.absent_gradients(chunk)) {
      absent_gradients_.for_each(chunk, forbid_with(chunks_.no_address(chunk, PayloadKind::kGrad)));
      absent_gradients_.point_at(chunk, nullptr);
    }
  }
}

void Session::guard_weights() {
  for (std::size_t i = 0; i < memory_.num_chunks(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    gate_->guard(i, chunks_.guard_of(chunk, PayloadKind::kParam));
    auto of_gradients = chunks_.guard_of(chunk, PayloadKind::kGrad);
    if (of_gradients == GateGroups::Guard::kNone && updates_.ranks() != nullptr &&
        updates_.ranks()->gradients().in_shared_host_storage(chunk)) {
      of_gradients = GateGroups::Guard::kHeld;  // writes make copies
    }
    gate_->guard(gradients_.group(chunk), of_gradients);
  }
}

void Session::settle_group(std::size_t group) {
  check_process();  // the threads that update and copy did not come along
  updates_.settle_group(group);
}

void Session::await_save(std::size_t group) {
  if (updates_.read_by_save(group)) {
    check_process();  // the thread that saves did not come along
    reads().wait(ChunkId{static_cast<std::uint32_t>(group)});
  }
}

void Session::check_requirements() const {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    if (params_[i].leaf.requires_grad() && !gradients_.required(param)) {
      throw tensor_errors::requires_grad_changed(layout().param(param).name);
    }
  }
}

void Session::stay_with_parent() {
  in_child_ = true;
  const auto leave = [](const c10::Storage& storage) {
    forbid(storage, tensor_errors::in_forked_child());
  };
  for (std::size_t i = 0; i < params_.size(); ++i) {
    leave(storages_.storage(ParamId{static_cast<std::uint32_t>(i)}));
  }
  gradients_.for_each_storage(leave);
  state_views_.for_each_storage(leave);
  passes_->abandon();  // one may be under way
}

void Session::check_process() const {
  if (in_child_) {
    throw UsageError(tensor_errors::in_forked_child());
  }
}

Session::Turn::Turn(std::shared_ptr<Session> session, PassTurn::Section kind,
                    const std::string& what)
    : session_(std::move(session)), kind_(kind) {
  session_->check_process();
  const Passes::Joined joined = session_->passes_->begin_section(kind, what);
  try {
    session_->take_over(joined);
  } catch (...) {
    session_->passes_->end_section(kind);
    throw;
  }
}

Session::Turn::~Turn() {
  if (!session_->in_child_) {
    session_->passes_->end_section(kind_);
  }
}

void Session::take_over(const Passes::Joined& joined) {
  if (joined.left_behind) {
    runtime().move_to_host();  // and what it left entered is entered no more
  }
}

void Session::tell_entered(std::string_view pass, ModuleId module) const {
  if (entered_) {
    entered_(pass, layout().module(module).name);
  }
}

void Session::enter(ModuleId module) {
  check_process();
  tell_entered("forward", module);
  const bool training = at::GradMode::is_enabled();
  const Passes::Joined joined = passes_->begin_forward();
  try {
    take_over(joined);
    memory_.device().follow_stream();
    if (module == kRoot && training && !joined.in_task) {
      check_requirements();
      check_consistent();
      updates_.updater().check_none_updated("the next forward began");
    }
    for (const ParamId param : layout().module(module).params) {
      param_memory_.take_up(param);
    }
    if (passes_->in_segment()) {
      gradients_.expect_several_passes(layout().chunks_of(module));
    }
    notice_new_operators();
    updates_.updater().check_not_updated(module);
    runtime().enter(module, training ? PassMode::kTraining : PassMode::kInference);
    for (const ChunkId chunk : layout().chunks_of(module)) {
      gate_->open(index(chunk));
    }
  } catch (...) {
    passes_->end_forward(runtime().idle());
    passes_->stop_charging();
    throw;
  }
}

void Session::exit(ModuleId module) {
  if (in_child_ || !passes_->mine()) {
    return;  // enter has thrown, and said why
  }
  memory_.device().follow_stream();
  runtime().exit(module);
  passes_->end_forward(runtime().idle());
}

void Session::enter_backward(ModuleId module, PassTurn::Origin origin) {
  check_process();
  tell_entered("backward", module);
  take_over(passes_->begin_backward(origin));
  memory_.device().follow_stream();
  updates_.updater().check_not_updated(module);
  runtime().enter_backward(module);
  updates_.updater().update_completed();
  note_updates();
}

// With Overlap::kBackward: until the step the weights are between two.
void Session::note_updates() {
  if (updates_.updater().armed() && updates_.updater().any_updated()) {
    passes_->turn().step_is_due();
  }
}

void Session::gradient_arrived(ParamId param, const at::Tensor& incoming) {
  check_process();
  const Passes::Joined joined = passes_->follow_backward();
  take_over(joined);
  memory_.device().follow_stream();
  const at::Tensor& grad = params_[index(param)].leaf.grad();
  if (!grad.defined()) {
    return;
  }
  if (updates_.ranks() != nullptr && grad.requires_grad()) {
    throw tensor_errors::gradient_in_graph(layout().param(param).name);
  }
  updates_.arriving(param);
  if (const auto chunk = gradients_.arrived(param, incoming, joined.nested)) {
    updates_.completed(*chunk);
    note_updates();
  }
}

void Session::gradient_rows_arrived(ParamId param, const at::Tensor& rows,
                                    const at::Tensor& gradients) {
  check_process();
  take_over(passes_->follow_backward());
  memory_.device().follow_stream();
  updates_.arriving(param);
  gradients_.rows_arrived(param, rows, gradients);
}

void Session::expect_no_backward() { passes_->stop_charging(); }

void Session::reduce_gradients(std::optional<std::size_t> optimizer) {
  check_consistent();
  memory_.device().follow_stream();
  param_memory_.take_up_all();
  if (SessionRanks* const ranks = updates_.ranks()) {
    const GilRelease released;
    updates_.await_reads_of_ranks();
    ranks->gradients().begin_step(optimizer, *gate_);
  }
}

void Session::make_gradient_present(ParamId param, double scale) {
  const ChunkId chunk = layout().place(param).chunk;
  gate_->pass(gradients_.group(chunk));
  updates_.writing(chunk);
  gradients_.average(chunk, [&] { gradients_.make_present(param, scale); });
}

GradientSummary Session::collect_gradients(bool with_norm) {
  check_consistent();
  memory_.device().follow_stream();
  updates_.begin_update();
  return gradients_.collect(
      with_norm, [this](std::span<double> squares) { updates_.measure_shards(squares); });
}

void Session::scale_gradients(double factor) {
  if (SessionRanks* const ranks = updates_.ranks()) {
    ranks->gradients().writing_all();
  }
  gradients_.scale(factor);
}

void Session::weights_updated(std::vector<WeightDigest> digests) {
  if (SessionRanks* const ranks = updates_.ranks()) {
    ranks->weights_updated(std::move(digests));
  }
}

void Session::finish_step() {
  check_process();
  memory_.device().follow_stream();
  gradients_.begin_step();
  updates_.finish_step();
  passes_->end_step();
  updates_.place_chunks_again();
}

bool Session::aliased_values(ChunkId chunk) const {
  const auto& params = layout().chunk(chunk).params;
  return std::any_of(params.begin(), params.end(), [this](ParamId param) {
    return param_memory_.aliased(param) || state_views_.aliased(param);
  });
}

}  // namespace castor
