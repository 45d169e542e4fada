#include "torch/state_views.h"

#include <algorithm>
#include <utility>

#include "torch/uses.h"

namespace castor {
namespace {

constexpr std::size_t kOwnUses = 2;  // of a view's storage: the view's, and the gate's

}  // namespace

const std::vector<at::Tensor>& StateViews::of(ParamId param, const OptimizerState& state,
                                              TensorGate& gate, std::size_t group) {
  const MutexLock lock(mutex_);
  std::vector<at::Tensor>& views = views_[index(param)];
  if (views.empty()) {
    views = state.views(param);
    for (const at::Tensor& view : views) {
      gate.watch(group, view);
    }
  }
  return views;
}

void StateViews::release(ParamId param, TensorGate& gate, std::size_t group) {
  std::vector<at::Tensor> views;
  {
    const MutexLock lock(mutex_);
    views.swap(views_[index(param)]);
  }
  for (const at::Tensor& view : views) {
    gate.unwatch(group, view);
    view.set_data(view.detach().clone());
  }
}

void StateViews::for_each_storage(const std::function<void(const c10::Storage&)>& visit) const {
  for (const auto& views : views_) {
    for (const at::Tensor& view : views) {
      visit(view.storage());
    }
  }
}

bool StateViews::hold(ParamId param, const void* storage) const {
  const MutexLock lock(mutex_);
  const auto& views = views_[index(param)];
  return std::any_of(views.begin(), views.end(), [storage](const at::Tensor& view) {
    return view.storage().unsafeGetStorageImpl() == storage;
  });
}

bool StateViews::aliased(ParamId param) const {
  const MutexLock lock(mutex_);
  const auto& views = views_[index(param)];
  return std::any_of(views.begin(), views.end(),
                     [](const at::Tensor& view) { return uses_of(view.storage()) > kOwnUses; });
}

}  // namespace castor
