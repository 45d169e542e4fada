#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "torch/session.h"

// The part of Session that keeps parameters and gradients in place for the operators that use them,
// and brings those on NVMe into memory (docs/design/0018, 0021).
namespace castor {
namespace {

/// What an operator uses, until it is over. Parts in the window come back before chunks
/// on the device may leave it.
struct OperatorVisit {
  OperatorVisit(std::shared_ptr<Session> of, Runtime& its) : session(std::move(of)), runtime(its) {}
  ~OperatorVisit() {
    home.reset();
    runtime.unpin(pins);
  }
  OperatorVisit(const OperatorVisit&) = delete;
  OperatorVisit& operator=(const OperatorVisit&) = delete;

  const std::shared_ptr<Session> session;  // whoever drops it meanwhile
  Runtime& runtime;
  std::vector<Pin> pins;
  std::unique_ptr<StoredWeights::Visit> home;
};

}  // namespace

bool Session::stored(ChunkId chunk) const noexcept { return weights_ && weights_->stored(chunk); }

bool Session::torn() const noexcept {
  return optimizer_state_->torn() || (weights_ && weights_->torn());
}

// On a device whose freed memory is lent out at once, what an operator has the address of must not
// leave before its kernel is given to a stream (docs/design/0021).
void Session::guard_weights() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const auto guard = stored(chunk) ? TensorGate::Guard::kBrought
                       : own_device_ ? TensorGate::Guard::kHeld
                                     : TensorGate::Guard::kNone;
    if (guard != TensorGate::Guard::kNone) {
      gate_->guard(index(chunk), guard);
      gate_->guard(gradient_group(chunk), guard);
    }
  }
  if (weights_) {
    weights_->forbid_addresses();
  }
}

// The gate's groups are numbered as the parts of StoredWeights.
std::shared_ptr<void> Session::visit_groups(std::span<const TensorGate::Use> uses) {
  check_process();
  const StreamId stream = own_device_.current_stream();
  auto visit = std::make_shared<OperatorVisit>(shared_from_this(), *runtime_);
  std::vector<WeightUse> parts;
  for (const TensorGate::Use& use : uses) {
    const ChunkId chunk{static_cast<std::uint32_t>(use.group % layout_.chunks().size())};
    const auto used = use.group == index(chunk) ? PayloadKind::kParam : PayloadKind::kGrad;
    if (auto pin = runtime_->hold(chunk, stream, used)) {
      visit->pins.push_back(std::move(*pin));
    } else if (stored(chunk)) {
      parts.push_back({.part = use.group, .writes = use.writes});
    }
  }
  if (!parts.empty()) {
    visit->home = weights_->visit(parts);
  }
  return visit;
}

// Those that live on the device, for kernels of castor's own.
std::shared_ptr<void> Session::hold_on_device(std::span<const ChunkId> chunks) const {
  if (!own_device_) {
    return nullptr;  // freed memory keeps its bytes
  }
  auto held = std::make_shared<OperatorVisit>(nullptr, *runtime_);
  for (const ChunkId chunk : chunks) {
    if (auto pin = runtime_->hold(chunk, own_device_.current_stream(), PayloadKind::kGrad)) {
      held->pins.push_back(std::move(*pin));
    }
  }
  return held;
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

// The first gradient since zero_grad: what the payload holds is the step's before, and forgotten
// where nobody has a tensor over it.
void Session::begin_gradients_of(ChunkId chunk) {
  if (!stored(chunk)) {
    return;
  }
  const auto& params = layout_.chunk(chunk).params;
  const auto has_gradient = [this](ParamId param) {
    return gradients_[index(param)].view.defined() &&
           params_[index(param)].grad().is_same(gradients_[index(param)].view);
  };
  if (std::none_of(params.begin(), params.end(), has_gradient) &&
      weights_->gradient_storage(chunk).use_count() <= gradient_uses_[index(chunk)]) {
    gate_->pass(gradient_group(chunk));
    weights_->discard_gradients(chunk);
  }
}

}  // namespace castor
