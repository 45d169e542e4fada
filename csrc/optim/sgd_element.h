#pragma once

// Internal to csrc/optim and the CUDA kernels: one element at a time.

#include "optim/element_state.h"
#include "optim/elementwise.h"
#include "optim/multiply_add.h"
#include "optim/rounding.h"

namespace castor {

/// The SGD update of one element, in the operations of torch.optim.SGD on the CPU, with its bits:
///   g = grad, or -grad;  g += weight_decay * w
///   b = g at the first step, then momentum * b + (1 - dampening) * g
///   w -= lr * (b, or with nesterov g + momentum * b)
/// An object is made once for each parameter and step (RuleCoefficients), with everything rounded
/// once.
template <bool has_buffer>
struct SgdElement {
  static constexpr bool kHasState = has_buffer;

  float grad_scale;  ///< negative to maximize
  float minus_lr;
  float weight_decay;
  float momentum;
  float one_minus_dampening;
  bool decays;       ///< whether torch adds the decay at all: -0 + 0 * w is not -0
  bool accelerates;  ///< whether momentum is not 0; else the buffer stays as it is
  bool first;        ///< whether this is the buffer's first step
  bool nesterov;

  [[nodiscard]] CASTOR_ELEMENTWISE detail::ElementState operator()(detail::ElementState old,
                                                                   float grad) const noexcept {
    float g = grad * grad_scale;
    g = detail::blend(decays, detail::multiply_add(old.weight, weight_decay, g), g);
    float buffer = old.state;
    if constexpr (has_buffer) {
      const float next = detail::multiply_add(g, one_minus_dampening, buffer * momentum);
      buffer = detail::blend(accelerates, detail::blend(first, g, next), buffer);
      const float ahead = detail::multiply_add(buffer, momentum, g);
      g = detail::blend(accelerates, detail::blend(nesterov, ahead, buffer), g);
    }
    return {detail::multiply_add(g, minus_lr, old.weight), buffer};
  }
};

}  // namespace castor
