#pragma once

// Internal to csrc/optim and the CUDA kernels.

namespace castor::detail {

/// Argument and result of the function of one element (lion_element.h, sgd_element.h); `state` is 0
/// where the rule keeps none.
struct ElementState {
  float weight;
  float state;
};

}  // namespace castor::detail
