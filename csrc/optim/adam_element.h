#pragma once

#include <cmath>

#include "optim/adam.h"
#include "optim/elementwise.h"
#include "optim/rounding.h"

namespace castor {

/// Weight and moments of one element. Value is float, or a vector of floats with its operators, for
/// which detail::square_root and detail::blend are declared before this file is included.
template <typename Value>
struct AdamElementOf {
  Value weight;
  Value exp_avg;
  Value exp_avg_sq;
};

using AdamElement = AdamElementOf<float>;

namespace detail {
[[nodiscard]] CASTOR_ELEMENTWISE float square_root(float x) noexcept { return std::sqrt(x); }
}  // namespace detail

/// Computes the first half of the Adam update of one element: the new moments and the decayed
/// weight. This file is the only place that has the formula.
///
/// Each operation is rounded on its own, in torch's order but for one division. There is no fused
/// multiply-add: compile with -ffp-contract=off, nvcc -fmad=false -ftz=true -prec-div=true
/// -prec-sqrt=true. The exception multiplies sqrt(v) by a reciprocal, at most one unit in the last
/// place away. Two divisions an element would keep a core from saturating fast memory
/// (docs/design/0005).
template <WeightDecayMode mode, typename Value>
[[nodiscard]] CASTOR_ELEMENTWISE AdamElementOf<Value> adam_moments(
    AdamElementOf<Value> old, Value grad, const AdamCoefficients& c) noexcept {
  Value g = grad * c.grad_scale;
  Value w = old.weight;
  if constexpr (mode == WeightDecayMode::kL2) {
    g = g + c.l2_factor * w;
  } else {
    w = w * c.decay_factor;
  }
  // torch.lerp(m, g, 1 - beta1) starts from the nearer end: m + (1 - beta1) (g - m), or
  // g - beta1 (g - m).
  const Value difference = g - old.exp_avg;
  const Value m =
      detail::blend(c.one_minus_beta1 < 0.5f, old.exp_avg, g) + c.lerp_weight * difference;
  const Value v = old.exp_avg_sq * c.beta2 + c.one_minus_beta2 * g * g;
  return {w, m, v};
}

/// Computes the second half of the update: the new weight.
template <typename Value>
[[nodiscard]] CASTOR_ELEMENTWISE Value adam_weight(AdamElementOf<Value> decayed,
                                                   const AdamCoefficients& c) noexcept {
  const Value denominator =
      detail::square_root(decayed.exp_avg_sq) * c.inverse_bias_correction2_sqrt + c.eps;
  return decayed.weight - c.step_size * decayed.exp_avg / denominator;
}

template <WeightDecayMode mode>
[[nodiscard]] CASTOR_ELEMENTWISE AdamElement adam_element(AdamElement old, float grad,
                                                          const AdamCoefficients& c) noexcept {
  const AdamElement decayed = adam_moments<mode>(old, grad, c);
  return {adam_weight(decayed, c), decayed.exp_avg, decayed.exp_avg_sq};
}

namespace detail {

/// Applies plain_nan to a weight and its moments.
[[nodiscard]] CASTOR_ELEMENTWISE AdamElement with_plain_nans(AdamElement updated) noexcept {
  return {plain_nan(updated.weight), plain_nan(updated.exp_avg), plain_nan(updated.exp_avg_sq)};
}

}  // namespace detail
}  // namespace castor
