// Session: what Python, operators and checkpoints read, write and load of it between the passes.
#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/chunk_pins.h"
#include "torch/session.h"

namespace castor {
namespace {

/// What an operator uses, until it is over. Parts in the window come back before chunks on the
/// device may leave it, and the session, whoever drops it meanwhile, goes last.
struct OperatorVisit {
  std::shared_ptr<Session> session;
  ChunkPins chunks;
  std::unique_ptr<StoredWeights::Visit> weights;
  std::vector<std::shared_ptr<void>> gradients;  // that are in parts
};

}  // namespace

bool Session::torn() const noexcept {
  return state_store_->torn() || (weights_ && weights_->torn());
}

// What was changed in the window is written when its memory is needed: in a forward, in a load.
void Session::note_torn_payloads() {
  if (integrity_.consistent() && torn()) {
    integrity_.broke(
        std::string(state_store_->torn() ? "an optimizer state" : "parameters or gradients") +
        " could not be written to NVMe");
  }
}

void Session::check_consistent() {
  check_process();
  note_torn_payloads();
  integrity_.check();
}

void Session::meet_to_load() {
  check_process();
  if (ranks_) {
    ranks_->check_there();
    ranks_->begin_load();
  }
}

void Session::begin_load(RunLoad load) {
  const Turn turn(shared_from_this(), PassTurn::Section::kPlain, "a load");
  own_device_.follow_stream();
  reads_.wait_for_all();
  if (ranks_) {
    ranks_->check_there();
  }
  updater_->abandon();
  passes_->turn().step_is_over();
  if (ranks_ && load.weights != LoadedWeights::kNone) {
    if (sharded_host_storage_.stage() == 3) {
      runtime_->move_to_host();
      end_reads_of_shards();
    }
    ranks_->begin_load();
  }
  gradients_->begin_step();
  note_torn_payloads();
  if (load.states || !integrity_.consistent()) {
    state_store_->discard_stored();
  }
  param_memory_->take_up_all();
  integrity_.loading(load);
  gate_->pass_all();
  runtime_->move_to_host();
  if (weights_ && sharded_host_storage_.stage() != 3 && load.weights == LoadedWeights::kAll) {
    weights_->discard_parameters();
  }
}

void Session::end_load(RunLoad load) { integrity_.loaded(load); }

void Session::share_weights() {
  if (ranks_) {
    ranks_->end_load(*state_store_);
  }
}

// A failure comes out once as what it is; from then on what it did to the run is said instead.
void Session::settle() {
  const Turn turn(shared_from_this(), PassTurn::Section::kPlain, "a read of the weights");
  if (consistent()) {
    await_updates();
  }
  own_device_.await();
  check_consistent();
  param_memory_->take_up_given();
}

void Session::settle(ParamId param) {
  check_process();
  gate_->pass(index(layout_.place(param).chunk));
  param_memory_->take_up(param);
  own_device_.await();
}

void Session::move_to_host() {
  const Turn turn(shared_from_this(), PassTurn::Section::kPlain, "a read of the weights");
  updater_->check_none_updated("the weights are read");
  settle();
  param_memory_->take_up_all();
  runtime_->move_to_host();
  own_device_.await();
}

std::vector<ChunkId> Session::begin_reads() {
  const Turn turn(shared_from_this(), PassTurn::Section::kPlain, "a save");
  move_to_host();
  reads_.begin();
  std::vector<ChunkId> not_held;
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    gate_->share(i);
    if (aliased_values(chunk) || state_store_->on_device(chunk)) {
      not_held.push_back(chunk);
    }
  }
  return not_held;
}

// The gate's groups are numbered as the parts of StoredWeights (docs/design/0018).
std::shared_ptr<void> Session::visit_groups(std::span<const TensorGate::Use> uses) {
  check_process();
  const StreamId stream = own_device_.current_stream();
  auto visit = std::make_shared<OperatorVisit>(OperatorVisit{.session = shared_from_this(),
                                                             .chunks = ChunkPins(*runtime_),
                                                             .weights = nullptr,
                                                             .gradients = {}});
  std::vector<WeightUse> parts;
  for (const TensorGate::Use& use : uses) {
    const ChunkId chunk{static_cast<std::uint32_t>(use.group % layout_.chunks().size())};
    const auto used = use.group == index(chunk) ? PayloadKind::kParam : PayloadKind::kGrad;
    if (ranks_ && used == PayloadKind::kGrad && use.writes) {
      ranks_->gradients().writing(chunk);
    }
    if (used == PayloadKind::kGrad && sharded_gradients(chunk)) {
      using Access = GradientShards::Access;
      visit->gradients.push_back(
          gradient_shards_->visit(chunk, use.writes ? Access::kWrite : Access::kRead));
      continue;
    }
    if (weights_ && used == PayloadKind::kParam && use.writes) {
      weights_->check_writable(chunk);
    }
    const bool in_no_memory =
        used == PayloadKind::kParam ? stored(chunk) : manager_->gradients_stored(chunk);
    if (!visit->chunks.add(chunk, stream, used) && in_no_memory) {
      parts.push_back({.part = use.group, .writes = use.writes});
    }
  }
  if (!parts.empty()) {
    visit->weights = weights_->visit(parts);
  }
  return visit;
}

std::shared_ptr<void> Session::visit(ParamId param, bool writes) {
  const ChunkId chunk = layout_.place(param).chunk;
  settle(param);
  if (!stored(chunk)) {
    return nullptr;
  }
  const TensorGate::Use use{.group = index(chunk), .writes = writes};
  return visit_groups(std::span(&use, 1));
}

std::optional<at::Tensor> Session::host_storage(ParamId param) {
  const ParamPlace place = layout_.place(param);
  if (!own_device_.computes_by_itself() || state_store_->on_device(place.chunk) ||
      stored(place.chunk)) {
    return std::nullopt;
  }
  settle(param);
  const ParamGeometry geometry = geometry_of(params_[index(param)].local);
  return at::for_blob(state_store_->element(param, PayloadKind::kParam), geometry.sizes)
      .strides(geometry.strides)
      .options(at::TensorOptions().dtype(to_torch(layout_.param(param).type)))
      .make_tensor();
}

std::string Session::content_of(const void* storage) {
  const auto is = [storage](const c10::Storage& own) {
    return own && own.unsafeGetStorageImpl() == storage;
  };
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const std::string named = "parameter '" + layout_.param(param).name + "'";
    if (is(storages_->storage(param))) {
      return named;
    }
    if (is(gradients_->storage(param))) {
      return "the gradient of " + named;
    }
    if (state_views_->hold(param, storage)) {
      return "an optimizer state of " + named;
    }
  }
  return "";
}

const std::vector<at::Tensor>& Session::states(ParamId param) {
  return state_views_->of(param, *optimizer_state_, *gate_, index(layout_.place(param).chunk));
}

}  // namespace castor
