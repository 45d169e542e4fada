#include "torch/state_views.h"

#include <algorithm>

namespace castor {

const StateViews::Views& StateViews::of(ParamId param, const OptimizerState& state,
                                        TensorGate& gate, std::size_t group) {
  Views& views = views_[index(param)];
  if (views.moments.empty()) {
    views.moments = state.moments(param);
    views.scales = state.moment_scales(param);
    for (const at::Tensor& moment : views.moments) {
      gate.watch(group, moment);
    }
    if (views.scales) {
      gate.watch(group, *views.scales);
    }
  }
  return views;
}

void StateViews::for_each_storage(const std::function<void(const c10::Storage&)>& visit) const {
  for (const Views& views : views_) {
    for (const at::Tensor& moment : views.moments) {
      visit(moment.storage());
    }
    if (views.scales) {
      visit(views.scales->storage());
    }
  }
}

bool StateViews::aliased(ParamId param) const {
  const auto in_use = [](const at::Tensor& tensor) { return tensor.storage().use_count() > 1; };
  const Views& views = views_[index(param)];
  return std::any_of(views.moments.begin(), views.moments.end(), in_use) ||
         (views.scales && in_use(*views.scales));
}

}  // namespace castor
