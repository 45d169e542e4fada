#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "torch/session.h"

// The part of Session that brings parameters and gradients on NVMe into memory for whoever reads
// them (docs/design/0018).
namespace castor {
namespace {

/// What an operator needs in memory, until it is over. Parts in the window come back before chunks
/// on the device may leave it.
struct OperatorVisit {
  explicit OperatorVisit(Runtime& of) : runtime(of) {}
  ~OperatorVisit() {
    home.reset();
    runtime.unpin(pins);
  }
  OperatorVisit(const OperatorVisit&) = delete;
  OperatorVisit& operator=(const OperatorVisit&) = delete;

  Runtime& runtime;
  std::vector<Pin> pins;
  std::unique_ptr<StoredWeights::Visit> home;
};

}  // namespace

bool Session::stored(ChunkId chunk) const noexcept { return weights_ && weights_->stored(chunk); }

bool Session::torn() const noexcept {
  return optimizer_state_->torn() || (weights_ && weights_->torn());
}

void Session::guard_stored_weights() {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    if (stored(chunk)) {
      gate_->guard(index(chunk));
      gate_->guard(gradient_group(chunk));
    }
  }
  if (weights_) {
    weights_->forbid_addresses();
  }
}

// The gate's groups are numbered as the parts of StoredWeights.
std::shared_ptr<void> Session::visit_groups(std::span<const TensorGate::Use> uses) {
  check_process();
  auto visit = std::make_shared<OperatorVisit>(*runtime_);
  std::vector<WeightUse> parts;
  for (const TensorGate::Use& use : uses) {
    if (use.group < layout_.chunks().size()) {
      if (auto pin = runtime_->pin_resident(ChunkId{static_cast<std::uint32_t>(use.group)})) {
        visit->pins.push_back(std::move(*pin));
        continue;
      }
    }
    parts.push_back({.part = use.group, .writes = use.writes});
  }
  if (!parts.empty()) {
    visit->home = weights_->visit(parts);
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
