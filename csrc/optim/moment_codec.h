#pragma once

// Internal to csrc/optim and the CUDA kernels: storage of a moment in kSplit and kSplitBf16.

#include <cstdint>

#include "optim/elementwise.h"
#include "optim/pairs.h"
#include "optim/rounding.h"
#include "optim/stochastic.h"

namespace castor::detail {

struct Fp32Moments {
  using Storage = float;
  static constexpr bool kRounds = false;
  CASTOR_ELEMENTWISE static float load(float value) noexcept { return value; }
  CASTOR_ELEMENTWISE static float round(float value, std::uint32_t /*random*/) noexcept {
    return value;
  }
};

struct Bf16Moments {
  using Storage = std::uint16_t;
  static constexpr bool kRounds = true;
  CASTOR_ELEMENTWISE static float load(std::uint16_t bits) noexcept { return from_bfloat16(bits); }
  CASTOR_ELEMENTWISE static std::uint16_t round(float value, std::uint32_t random) noexcept {
    return round_stochastically_to_bfloat16(value, random);
  }
  /// Rounds two values, and returns them as a pair.
  CASTOR_ELEMENTWISE static std::uint32_t round(Pair<float> values,
                                                Pair<std::uint32_t> random) noexcept {
    const Pair<std::uint32_t> bits = bits_of(values);
    return upper_halves({bits.first + random.first, bits.second + random.second});
  }
};

}  // namespace castor::detail
