#pragma once

// Internal to csrc/optim and the CUDA kernels: one element at a time.

#include "optim/element_state.h"
#include "optim/elementwise.h"
#include "optim/multiply_add.h"
#include "optim/rounding.h"

namespace castor {

/// The Lion update of one element (Chen et al. 2023, algorithm 2), in the operations of
/// castor.optim.Lion's own step, with its bits:
///   w *= 1 - lr * weight_decay;  w -= lr * sign(beta1 * m + (1 - beta1) * g)
///   m = beta2 * m + (1 - beta2) * g
/// An object is made once for each parameter and step (RuleCoefficients), with everything rounded
/// once.
struct LionElement {
  static constexpr bool kHasState = true;

  float grad_scale;
  float minus_lr;
  float decay_factor;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;

  [[nodiscard]] CASTOR_ELEMENTWISE detail::ElementState operator()(detail::ElementState old,
                                                                   float grad) const noexcept {
    const float g = grad * grad_scale;
    const float w = old.weight * decay_factor;
    const float u = detail::multiply_add(g, one_minus_beta1, old.state * beta1);
    // As torch.sign: 0 of zeros and NaN.
    const float sign = detail::blend(u > 0.0f, 1.0f, detail::blend(u < 0.0f, -1.0f, 0.0f));
    return {detail::multiply_add(sign, minus_lr, w),
            detail::multiply_add(g, one_minus_beta2, old.state * beta2)};
  }
};

}  // namespace castor
