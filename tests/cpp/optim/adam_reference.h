#pragma once

#include <cstdint>

#include "core/scalar_type.h"
#include "optim/adam.h"

namespace castor::testing {

// The specification once more, written plainly and sharing no code with csrc/optim, in scalar code
// for the compiler's default target.

/// value rounded to `type` (ties away from zero for bf16, to even for fp16), as its bits.
[[nodiscard]] std::uint16_t reference_round(float value, ScalarType type);

/// The value of 16 bits of `type`.
[[nodiscard]] float reference_load(std::uint16_t bits, ScalarType type);

struct ReferenceElement {
  float weight, exp_avg, exp_avg_sq;
};

/// One fp32 step; the caller sets the flush-to-zero mode.
[[nodiscard]] ReferenceElement reference_adam(ReferenceElement old, float grad,
                                              const AdamOptions& options, std::int64_t step,
                                              double grad_scale);

/// Adam in double throughout, for the size of the rounding errors.
struct DoubleAdam {
  double weight = 0, exp_avg = 0, exp_avg_sq = 0;
  void step(double grad, const AdamOptions& options, std::int64_t step);
};

}  // namespace castor::testing
