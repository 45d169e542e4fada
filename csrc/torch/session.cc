#include "torch/session.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "parallel/make_executor.h"
#include "store/chunk_pins.h"
#include "store/session_nvme.h"
#include "torch/gil.h"
#include "torch/nonmodel_account.h"
#include "torch/param_specs.h"
#include "torch/uses.h"

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

HostStoragePayer payer(const RankHostStorage& common, const ShardedHostStorage& sharded) {
  return common.weights().storage ? HostStoragePayer::kRankHostStorage
         : sharded.stage() == 3   ? HostStoragePayer::kSharded
         : sharded.stage() == 2   ? HostStoragePayer::kShardedGradients
                                  : HostStoragePayer::kHostBudget;
}

std::size_t room_for_places(const MemoryTier& host, const RankHostStorage& common,
                            const ShardedHostStorage& sharded) {
  const std::size_t available = host.ledger().available();
  return available - std::min(available, common.room_for_copies() + sharded.room_for_copies());
}

/// Returns, per chunk, whether its gradients have no permanent storage in memory.
std::vector<bool> absent_gradients(const ChunkLayout& layout, const StoragePlan& places,
                                   const ShardedHostStorage& sharded) {
  std::vector<bool> absent(layout.chunks().size(), false);
  for (std::size_t i = 0; i < absent.size(); ++i) {
    absent[i] = layout.chunks()[i].trainable &&
                (places.stored.weights[i] ||
                 (sharded.shards() != nullptr &&
                  sharded.shards()->sharded(
                      ChunkId{static_cast<std::uint32_t>(absent.size() + i)})));  // of gradients
  }
  return absent;
}

/// nullptr: none.
std::unique_ptr<GradientShards> make_gradient_shards(const ChunkLayout& layout,
                                                     const ShardedHostStorage& sharded,
                                                     MemoryTier& host,
                                                     const AddressFollower& follower) {
  return sharded.shards() == nullptr
             ? nullptr
             : std::make_unique<GradientShards>(layout, *sharded.shards(), host, follower);
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
                                         const std::vector<std::optional<ScalarType>>& types,
                                         std::vector<ModuleSpec> modules,
                                         const SessionOptions& options,
                                         std::span<const ParamId> valueless) {
  const at::NoGradGuard no_grad;
  auto specs = describe(params, std::move(param_names), trained, options.state.ruled, types);
  const UpdateRule* const rule = options.state.rule.get();
  if (const DeviceKernels* const kernels = options.backend->kernels();
      rule != nullptr && kernels != nullptr && !kernels->has(rule->name())) {
    throw InvalidArgument("this device has no kernels for the optimizer '" +
                          std::string(rule->name()) + "'; use device=\"cpu\"");
  }
  LayoutOptions layout_options = options.layout;
  layout_options.param_alignment = param_alignment(rule, options.precision);
  ChunkLayout layout(std::move(specs), std::move(modules), layout_options);
  std::vector<Placement> placements = place_chunks(layout, options.placement);
  SessionOptions left = options;
  if (left.state.nvme) {
    left.state.nvme->budget_bytes = options.budgets->nvme()->available();
  }
  Runtime::make_way(*options.budgets->runtimes());
  // Not make_shared: the constructor is private, and the destructor waits for copies and updates.
  std::shared_ptr<Session> session(
      new Session(std::move(params), std::move(layout), std::move(placements), left),
      [](const Session* ended) {
        const GilRelease released;
        delete ended;
      });
  const std::vector<std::size_t> others = session->adopt_parameters(valueless);
  session->watch_tensors(options.overlap, others);
  return session;
}

Session::Session(std::vector<at::Tensor> params, ChunkLayout layout,
                 std::vector<Placement> placements, const SessionOptions& options)
    : layout_(std::move(layout)),
      shards_(layout_, options.ranks ? options.ranks->passes->rank() : 0),
      own_device_(options.backend),
      budgets_(options.budgets),
      budget_place_(*budgets_, options.name),
      device_(std::make_shared<MemoryTier>(budgets_->device(), budget_place_.owner(),
                                           options.backend->make_device_arena(),
                                           own_device_.stream())),
      host_(std::make_shared<MemoryTier>(budgets_->host(), budget_place_.owner(),
                                         options.backend->make_host_arena())),
      nvme_ledger_(nvme_ledger(options, budget_place_.owner())),
      nonmodel_(own_device_.computes_by_itself() ? budgets_->tensors_of_torch()
                                                 : std::make_shared<NonModelMemory>(device_)),
      rank_host_storage_(layout_, placements, options, *host_),
      executor_(make_executor(options.num_threads)),
      sharded_host_storage_(make_sharded_host_storage(layout_, placements, options,
                                                      rank_host_storage_, *host_, *executor_)),
      places_(plan_storage(layout_, placements, options.state,
                           room_for_places(*host_, rank_host_storage_, sharded_host_storage_),
                           payer(rank_host_storage_, sharded_host_storage_))),
      nvme_(make_nvme(places_, options, *host_, *executor_, nvme_ledger_.get(),
                      budget_place_.number(), nvme_taken_)),
      copy_engine_(options.backend->make_copy_engine()),
      storages_(std::make_unique<ChunkStorages>(layout_, torch_device())),
      absent_gradients_(layout_, absent_gradients(layout_, places_, sharded_host_storage_),
                        torch_device()),
      gradient_shards_(
          make_gradient_shards(layout_, sharded_host_storage_, *host_, absent_gradients_)),
      weights_(make_weights()),
      manager_(std::make_unique<ChunkManager>(layout_, std::move(placements), device_, host_,
                                              *copy_engine_, *storages_, weights_.get(),
                                              rank_host_storage_.weights().tier)),
      reads_(layout_.chunks().size(),
             [this](ChunkId chunk) { return chunk_copies_->finish(chunk); }) {
  for (at::Tensor& param : params) {
    params_.push_back({.leaf = param, .local = std::move(param)});
  }
  gradients_ = std::make_unique<GradientSink>(
      *manager_, params_, weights_.get(), gradient_shards_.get(), absent_gradients_, *executor_,
      own_device_, options.precision == ScalarType::kFloat16, rank_host_storage_.gradients().tier);
  state_store_ = std::make_unique<StateStore>(
      *manager_, shards_, options.state.rule, places_.stored.states,
      stream_of(nvme_, StoragePlan::kStates), weights_.get(),
      rank_host_storage_.weights().storage.get(), sharded_host_storage_.shards(),
      gradient_shards_.get(), own_device_);
  if (options.ranks) {
    check_ranks();
    ranks_ = std::make_unique<SessionRanks>(
        *options.ranks, *manager_, shards_, *gradients_, gradient_shards_.get(), *state_store_,
        rank_host_storage_, options.backend->make_staging_engine(), *executor_);
    integrity_.when_broken([this] {
      ranks_->leave();
      if (sharded_host_storage_.shards() != nullptr) {
        sharded_host_storage_.shards()->leave();
      }
    });
  }
  chunk_copies_ = std::make_unique<ChunkCopies>(layout_, shards_, *state_store_, *executor_,
                                                host_->ledger(), reads_);
  optimizer_state_ = std::make_unique<OptimizerState>(
      *manager_, shards_, *state_store_, params_, *executor_, options.state.rule, *chunk_copies_,
      ranks_ ? &ranks_->states() : nullptr);
  chunk_updates_ = std::make_unique<ChunkUpdates>(layout_, shards_, *state_store_, *executor_,
                                                  options.state.rule, reads_,
                                                  ranks_ ? &ranks_->weights() : nullptr);
  storages_->on_write_back([this](ChunkId chunk, const std::byte* host, const std::byte* slot) {
    const auto scope = own_device_.run_on_stream();  // an eviction may come from any thread
    optimizer_state_->before_write_back(chunk, host, slot);
  });
  if (copy_engine_->asynchronous()) {
    gradients_->copy_beside_backward(*copy_engine_, *nonmodel_);
  }
  RuntimeOptions runtime_options = options.runtime;
  runtime_options.freed_slots =
      own_device_.computes_by_itself() ? FreedSlots::kReusedAtOnce : FreedSlots::kKeepTheirBytes;
  runtime_ = std::make_unique<Runtime>(*manager_, nonmodel_, runtime_options,
                                       Runtime::Clock(monotonic_ns), budgets_->runtimes());
  passes_ =
      std::make_shared<Passes>(*runtime_, own_device_.computes_by_itself() ? nullptr : nonmodel_);
  if (ranks_) {
    // A backward pass ends with the mean of its gradients, so that what looks at p.grad after it
    // sees what one process with all batches would.
    passes_->at_backward_end([this] {
      const GilRelease released;
      ranks_->gradients().end_backward(*gate_);
    });
  }
  budgets_->follow_torch(*options.backend,
                         account_of(budgets_->tensors_of_torch(), options.backend));
  if (options.overlap != Overlap::kNone) {
    update_queue_ = std::make_unique<UpdateQueue>(
        layout_.chunks().size(), ranks_ ? UpdateOrder::kSubmitted : UpdateOrder::kWanted);
    manager_->follow(update_queue_.get());
  }
}

std::unique_ptr<StoredWeights> Session::make_weights() {
  if (ChunkStream* const stream = sharded_host_storage_.stream()) {
    return std::make_unique<StoredWeights>(
        StoredWeights::on_ranks(sharded_host_storage_.sharded(), ShardedHostStorage::kMaxLeases),
        *storages_, absent_gradients_, *stream, own_device_);
  }
  ChunkStream* const stream = stream_of(nvme_, StoragePlan::kWeights);
  return stream == nullptr
             ? nullptr
             : std::make_unique<StoredWeights>(
                   StoredWeights::on_nvme(places_.stored.weights, stream->num_slots()), *storages_,
                   absent_gradients_, *stream, own_device_);
}

std::size_t Session::zero_stage() const noexcept {
  if (!ranks_ || !rank_host_storage_.weights().storage) {
    return !ranks_ ? 0 : std::max<std::size_t>(sharded_host_storage_.stage(), 1);
  }
  const bool once = rank_host_storage_.nodes() == 1 &&
                    std::all_of(layout_.chunks().begin(), layout_.chunks().end(),
                                [](const ChunkSpec& chunk) { return chunk.updated_in_shards(); });
  return once ? 3 : 1;
}

void Session::check_ranks() const {
  if (stream_of(nvme_, StoragePlan::kWeights) != nullptr) {
    throw UsageError(
        "host_memory has no room for the parameters, and parameters on NVMe are not "
        "trained by several ranks yet: raise host_memory, or train with one process");
  }
}

ChunkStream* Session::activation_stream() const noexcept {
  return stream_of(nvme_, StoragePlan::kActivations);
}

bool Session::synchronise(bool on) { return !ranks_ || ranks_->gradients().synchronise(on); }

Session::~Session() {
  if (sharded_host_storage_.shards() != nullptr) {
    sharded_host_storage_.shards()
        ->end_reads();  // else ranks that have failed may wait here for each other
  }
  reads_.end_all();  // else an update may wait for who has gone
  if (update_queue_) {
    update_queue_->abandon();  // returns when none is under way
  }
  share_with_children(*manager_, layout_.chunks().size());  // what outlives the session
  gate_.reset();
  ranks_.reset();
  gradients_.reset();
  passes_.reset();
  runtime_.reset();
  std::vector<std::shared_ptr<Payload>> host_payloads;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    host_payloads.push_back(
        manager_->payload(ChunkId{static_cast<std::uint32_t>(i)}, PayloadKind::kParam));
  }
  own_device_.leave(
      host_payloads);  // before payloads go that a promotion has read, and after the last
  manager_.reset();    // slots have gone home
  weights_.reset();
  own_device_.leave(host_payloads);
  storages_->release_to_host(host_payloads);
  // What tensors keep of it is theirs: the other models have its room.
  host_->ledger().leave();
  if (!own_device_.computes_by_itself()) {
    device_->ledger().leave();
  }
}

std::size_t Session::device_bytes() const noexcept {
  const std::size_t tensors = own_device_.computes_by_itself() ? nonmodel_->bytes() : 0;
  return device_->ledger().used() + tensors;
}

// Nothing here allocates payload memory: once the first parameter moves, all will. What else lies
// over a parameter's storage (a buffer, a state_dict) goes with it where the storage can.
std::vector<std::size_t> Session::adopt_parameters(std::span<const ParamId> valueless) {
  std::vector<bool> has_values(params_.size(), true);
  for (const ParamId param : valueless) {
    has_values[index(param)] = false;
  }
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    storages_->bind(chunk, manager_->payload(chunk, PayloadKind::kParam)->data());
  }
  std::vector<at::Tensor> locals;
  std::vector<std::size_t> others(params_.size(), 0);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const at::Tensor& own = params_[i].local;
    if (has_values[i] && torch_device().is_cpu() && !stored(layout_.place(param).chunk) &&
        ParamMemory::fills_storage(own, to_torch(layout_.param(param).type)) &&
        uses_of(own.storage()) > 1) {
      others[i] = uses_of(own.storage()) - 1;
      optimizer_state_->adopt(param, own);
      storages_->adopt(param, own.storage());
      locals.push_back(own);
      continue;
    }
    const at::Tensor host =
        tensor_over(storages_->storage(param), to_torch(layout_.param(param).type), /*offset=*/0,
                    geometry_of(params_[i].local));
    if (has_values[i]) {
      optimizer_state_->adopt(param, params_[i].local);
    }
    params_[i].local.set_data(host);
    locals.push_back(params_[i].local);
  }
  storages_->watch(locals);
  return others;
}

void Session::watch_tensors(Overlap overlap, std::span<const std::size_t> others) {
  gate_ = TensorGate::create(
      2 * layout_.chunks().size(), [this](std::size_t group) { settle_group(group); },
      {.reads = [this](std::size_t group) { return read_by_save(group); },
       .await = [this](std::size_t group) { await_save(group); }},
      [weak = weak_from_this()](auto uses) {
        const auto session = weak.lock();  // an operator may be the last that uses the model
        return session ? session->visit_groups(uses) : nullptr;
      });
  steps_ = at::zeros({static_cast<std::int64_t>(params_.size())}, at::kFloat);
  updater_ = std::make_unique<Updater>(
      Updater::Parts{.layout = layout_,
                     .updates = *chunk_updates_,
                     .places = *state_store_,
                     .gradients = *gradients_,
                     .runtime = *runtime_,
                     .gate = *gate_,
                     .integrity = integrity_,
                     .copies = *copy_engine_,
                     .device = own_device_,
                     .queue = update_queue_.get(),
                     .steps = [this](ParamId param) -> float& {
                       return steps_.mutable_data_ptr<float>()[index(param)];
                     },
                     // As torch's in-place update does: a graph that saved the old weights must not
                     // be replayed.
                     .replaced =
                         [this](ParamId param) {
                           params_[index(param)].local.unsafeGetTensorImpl()->bump_version();
                         }},
      overlap, [this](ChunkId chunk) { return aliased(chunk) || param_memory_->rebound(chunk); });
  guard_weights();
  state_views_ = std::make_unique<StateViews>(params_.size());
  param_memory_ =
      std::make_unique<ParamMemory>(layout_, params_, *storages_, *optimizer_state_,
                                    [this](ParamId param) { return visit(param, false); });
  param_memory_->watch(*gate_, others);
  gradients_->open(*runtime_, *gate_, weak_from_this());
  forbid_absent_addresses();  // all tensors are made
}

// From now on torch tells the address of what is not always in memory only while it is there.
void Session::forbid_absent_addresses() {
  const auto forbid_with = [](const std::string& message) {
    return [&message](const c10::Storage& storage) { forbid_null(storage, message); };
  };
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (stored(chunk)) {
      storages_->for_each(chunk, forbid_with(weights_->no_address()));
      storages_->point_at(chunk, nullptr);
    }
    if (sharded_gradients(chunk) || manager_->gradients_stored(chunk)) {
      absent_gradients_.for_each(chunk,
                                 forbid_with(sharded_gradients(chunk) ? GradientShards::no_address()
                                                                      : weights_->no_address()));
      absent_gradients_.point_at(chunk, nullptr);
    }
  }
}

// On a device whose freed memory is lent out at once, what an operator has the address of must not
// leave before its kernel is given to a stream (docs/design/0021).
void Session::guard_weights() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const auto guard = [this](bool in_no_memory) {
      return in_no_memory                       ? TensorGate::Guard::kBrought
             : own_device_.computes_by_itself() ? TensorGate::Guard::kHeld
                                                : TensorGate::Guard::kNone;
    };
    if (const auto of_weights = guard(stored(chunk)); of_weights != TensorGate::Guard::kNone) {
      gate_->guard(i, of_weights);
    }
    if (const auto of_gradients =
            guard(manager_->gradients_stored(chunk) || sharded_gradients(chunk));
        of_gradients != TensorGate::Guard::kNone) {
      gate_->guard(gradients_->group(chunk), of_gradients);
    } else if (ranks_ && ranks_->gradients().in_shared_host_storage(chunk)) {
      gate_->guard(gradients_->group(chunk), TensorGate::Guard::kHeld);  // writes make copies
    }
  }
}

void Session::settle_group(std::size_t group) {
  check_process();  // the threads that update and copy did not come along
  const ChunkId chunk{static_cast<std::uint32_t>(group % layout_.chunks().size())};
  const bool of_gradients = group == gradients_->group(chunk);
  if (updater_->updated(chunk)) {
    updater_->check_none_updated(of_gradients ? "a gradient was read or changed"
                                              : "a weight or moment was read");
  }
  if (of_gradients) {
    gradients_->wait(chunk);
    if (ranks_) {
      ranks_->gradients().wait(chunk);
    }
  }
  updater_->wait(chunk);
}

// Gradients are no part of what is saved.
bool Session::read_by_save(std::size_t group) const {
  return group < layout_.chunks().size() &&
         reads_.reading(ChunkId{static_cast<std::uint32_t>(group)});
}

void Session::await_save(std::size_t group) {
  if (read_by_save(group)) {
    check_process();  // the thread that saves did not come along
    reads_.wait(ChunkId{static_cast<std::uint32_t>(group)});
  }
}

void Session::check_requirements() const {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const ParamSpec& spec = layout_.param(param);
    if (params_[i].leaf.requires_grad() != gradients_->required(param)) {
      throw UsageError(
          "parameter '" + spec.name +
          "' had requires_grad=" + (gradients_->required(param) ? "True" : "False") +
          " when the model was boosted and has " +
          (gradients_->required(param) ? "False" : "True") +
          " now; set it before booster.boost, which lays out gradients and optimizer "
          "state for the trainable parameters, or call booster.reboost(model, optimizer) now");
    }
  }
}

void Session::stay_with_parent() {
  in_child_ = true;
  const auto leave = [](const c10::Storage& storage) { forbid(storage, kInChild); };
  for (std::size_t i = 0; i < params_.size(); ++i) {
    leave(storages_->storage(ParamId{static_cast<std::uint32_t>(i)}));
  }
  gradients_->for_each_storage(leave);
  state_views_->for_each_storage(leave);
  passes_.reset();  // one may have been under way: its end asks the runtime
}

void Session::check_process() const {
  if (in_child_) {
    throw UsageError(kInChild);
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
    runtime_->move_to_host();  // and what it left entered is entered no more
  }
}

void Session::enter(ModuleId module) {
  check_process();
  const bool training = at::GradMode::is_enabled();
  const Passes::Joined joined = passes_->begin_forward();
  try {
    take_over(joined);
    own_device_.follow_stream();
    if (module == kRoot && training && !joined.in_task) {
      check_requirements();
      check_consistent();
      updater_->check_none_updated("the next forward began");
    }
    for (const ParamId param : layout_.module(module).params) {
      param_memory_->take_up(param);
    }
    if (passes_->in_segment()) {
      gradients_->expect_several_passes(layout_.chunks_of(module));
    }
    notice_new_operators();
    updater_->check_not_updated(module);
    runtime_->enter(module, training ? PassMode::kTraining : PassMode::kInference);
    for (const ChunkId chunk : layout_.chunks_of(module)) {
      gate_->open(index(chunk));
    }
  } catch (...) {
    passes_->end_forward(runtime_->idle());
    passes_->stop_charging();
    throw;
  }
}

void Session::exit(ModuleId module) {
  if (in_child_ || !passes_->mine()) {
    return;  // enter has thrown, and said why
  }
  own_device_.follow_stream();
  runtime_->exit(module);
  passes_->end_forward(runtime_->idle());
}

void Session::enter_backward(ModuleId module, PassTurn::Origin origin) {
  check_process();
  take_over(passes_->begin_backward(origin));
  own_device_.follow_stream();
  updater_->check_not_updated(module);
  runtime_->enter_backward(module);
  updater_->update_completed();
  note_updates();
}

// With Overlap::kBackward: until the step the weights are between two.
void Session::note_updates() {
  if (updater_->armed() && updater_->any_updated()) {
    passes_->turn().step_is_due();
  }
}

void Session::gradient_arrived(ParamId param, const at::Tensor& incoming) {
  check_process();
  const Passes::Joined joined = passes_->follow_backward();
  take_over(joined);
  own_device_.follow_stream();
  const at::Tensor& grad = params_[index(param)].leaf.grad();
  if (!grad.defined()) {
    return;
  }
  const ChunkId own = layout_.place(param).chunk;
  if (ranks_) {
    if (grad.requires_grad()) {
      throw UsageError("the gradient of parameter '" + layout_.param(param).name +
                       "' is a part of a graph (backward(create_graph=True)), which several ranks "
                       "cannot bring together; train with one process");
    }
    ranks_->gradients().arriving(own, *gate_);
  }
  if (updater_->updated(own)) {
    updater_->check_none_updated("another gradient of parameter '" + layout_.param(param).name +
                                 "' arrived");
  }
  if (const auto chunk = gradients_->arrived(param, incoming, joined.nested)) {
    updater_->completed(*chunk);
    note_updates();
    if (ranks_) {
      ranks_->gradients().completed(*chunk, *gate_);
    }
  }
}

void Session::expect_no_backward() {
  if (passes_) {
    passes_->stop_charging();
  }
}

void Session::reduce_gradients(std::optional<std::size_t> optimizer) {
  check_consistent();
  own_device_.follow_stream();
  param_memory_->take_up_all();
  if (ranks_) {
    const GilRelease released;
    ranks_->gradients().begin_step(optimizer, *gate_);
  }
}

void Session::make_gradient_present(ParamId param, double scale) {
  const ChunkId chunk = layout_.place(param).chunk;
  gate_->pass(gradients_->group(chunk));
  if (ranks_) {
    ranks_->gradients().writing(chunk);
  }
  gradients_->average(chunk, [&] { gradients_->make_present(param, scale); });
}

GradientSummary Session::collect_gradients(bool with_norm) {
  check_consistent();
  own_device_.follow_stream();
  runtime_->begin_update();
  if (sharded_host_storage_.stage() == 3) {
    end_reads_of_shards();
    ranks_->meet();
  }
  updater_->forget_completed();
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (!updater_->updated(chunk)) {  // else they are used already, and may still be under way
      gate_->pass(i);
      gate_->pass(gradients_->group(chunk));
    }
  }
  return gradients_->collect(with_norm, [this](std::span<double> squares) {
    ranks_->gradients().measure_shards(squares);
  });
}

// Of weights as they are before all ranks update them, or load others: the next are of those. And
// what the last update sends between copies.
void Session::end_reads_of_shards() {
  reads_.wait_for_all();
  weights_->await_reads();
  sharded_host_storage_.shards()->await_exchanges();
}

void Session::scale_gradients(double factor) {
  if (ranks_) {
    ranks_->gradients().writing_all();
  }
  gradients_->scale(factor);
}

void Session::weights_updated(std::vector<WeightDigest> digests) {
  if (ranks_) {
    ranks_->weights_updated(std::move(digests));
  }
}

void Session::finish_step() {
  check_process();
  own_device_.follow_stream();
  gradients_->begin_step();
  if (ranks_) {
    ranks_->gradients().end_step();
  }
  runtime_->finish_step();
  passes_->end_step();
  place_chunks_again();
}

bool Session::aliased_values(ChunkId chunk) const {
  const auto& params = layout_.chunk(chunk).params;
  return std::any_of(params.begin(), params.end(), [this](ParamId param) {
    return param_memory_->aliased(param) || state_views_->aliased(param);
  });
}

// A tensor over a chunk's memory follows it to the device and back (docs/design/0017), but memory
// that was reached without one (a numpy array) would not: a chunk that something else than castor
// refers to stays where it is. So does one of which something is on NVMe, or in parts on the ranks.
void Session::place_chunks_again() {
  if (!runtime_->placement_due() || !integrity_.consistent() || reads_.reading()) {
    return;  // while a save reads payloads they stay where they are: a later step places them
  }
  await_updates();
  std::vector<bool> candidates(layout_.chunks().size());
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    candidates[i] = manager_->promoted(chunk) || (!state_store_->stored(chunk) && !stored(chunk) &&
                                                  !sharded_gradients(chunk) && !aliased(chunk));
  }
  runtime_->place(candidates);
}

bool Session::sharded_gradients(ChunkId chunk) const noexcept {
  return gradient_shards_ && gradient_shards_->sharded(chunk);
}

bool Session::stored(ChunkId chunk) const noexcept { return weights_ && weights_->stored(chunk); }

}  // namespace castor
