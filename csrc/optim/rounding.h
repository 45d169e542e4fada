#pragma once

#include <bit>
#include <cstdint>

#include "core/scalar_type.h"
#include "optim/elementwise.h"

namespace castor {

// Conversions between the fp32 master and the 16-bit types, one element at a time. Branch-free
// integer arithmetic, so that loops over them vectorise and every instruction set (and the
// flush-to-zero mode) gives the same bits.

namespace detail {
/// Returns condition ? a : b, without the branch that GCC may make of the expression and that stops
/// its vectoriser.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint32_t blend(bool condition, std::uint32_t a,
                                                               std::uint32_t b) noexcept {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

[[nodiscard]] CASTOR_ELEMENTWISE constexpr float blend(bool condition, float a, float b) noexcept {
  return std::bit_cast<float>(
      blend(condition, std::bit_cast<std::uint32_t>(a), std::bit_cast<std::uint32_t>(b)));
}

/// Returns `x`, or the NaN 0x7fc00000 for any NaN. A GPU's arithmetic makes 0x7fffffff, which the
/// roundings that add to the bits (param_of, round_stochastically_to_bfloat16) would carry over
/// into a zero.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr float plain_nan(float x) noexcept {
  return x != x ? std::bit_cast<float>(0x7fc00000u) : x;
}
}  // namespace detail

/// Rounds to nearest, ties AWAY from zero. So every master lies within [-0x8000, 0x7fff] steps of
/// its bf16 value, and (bf16, signed 16-bit remainder) is an exact fp32; with ties to even, two
/// masters would share one pair. Overflow gives infinity; NaN stays NaN, its sign kept.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint16_t round_to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = detail::blend(is_nan, bits | 0x00400000u, bits + 0x8000u);
  return static_cast<std::uint16_t>(rounded >> 16);
}

/// Rounds to nearest, ties to even, as torch and processors do. Overflow gives infinity; NaN stays
/// NaN, its sign kept.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint16_t round_to_even_bfloat16(
    float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>(detail::blend(is_nan, bits | 0x00400000u, rounded) >> 16);
}

[[nodiscard]] CASTOR_ELEMENTWISE constexpr float from_bfloat16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

/// Rounds to nearest, ties to even, as F16C and torch do. Magnitudes from 65520 give infinity; NaN
/// stays NaN and becomes quiet.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint16_t round_to_float16(float value) noexcept {
  constexpr std::uint32_t kOverflow = 0x47800000u;   // 2^16: from here on infinity
  constexpr std::uint32_t kMinNormal = 0x38800000u;  // 2^-14
  constexpr std::uint32_t kRebias = 112u << 23;      // exponent bias 127 to 15
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t finite = detail::blend(magnitude < kOverflow, magnitude, kOverflow);
  const std::uint32_t normal = (finite - kRebias + 0xfffu + ((finite >> 13) & 1u)) >> 13;
  // In [0.5, 1) one fp32 step is 2^-24, the step of subnormal fp16: the addition does the rounding.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(finite) + 0.5f) - 0x3f000000u;
  const std::uint32_t number = detail::blend(finite < kMinNormal, subnormal, normal);
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const std::uint32_t result = detail::blend(magnitude > 0x7f800000u, nan, number);
  return static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | result);
}

/// Converts exactly. A signalling NaN becomes quiet.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr float from_float16(std::uint16_t bits) noexcept {
  constexpr std::uint32_t kRebias = 112u << 23;
  const std::uint32_t magnitude = std::uint32_t{bits} & 0x7fffu;
  const std::uint32_t shifted = magnitude << 13;
  const std::uint32_t normal = shifted + kRebias;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(
      std::bit_cast<float>(normal + (1u << 23)) - std::bit_cast<float>(kRebias + (1u << 23)));
  const std::uint32_t special =
      (shifted + 2 * kRebias) | detail::blend(magnitude > 0x7c00u, 0x00400000u, 0u);
  const std::uint32_t number = detail::blend(magnitude < 0x400u, subnormal, normal);
  const std::uint32_t result = detail::blend(magnitude >= 0x7c00u, special, number);
  return std::bit_cast<float>(((std::uint32_t{bits} & 0x8000u) << 16) | result);
}

/// Storage of an array of a ScalarType, with the conversions that read and write an element.
template <ScalarType type>
struct ScalarCodec;

template <>
struct ScalarCodec<ScalarType::kFloat32> {
  using Storage = float;
  CASTOR_ELEMENTWISE static constexpr float load(float value) noexcept { return value; }
  CASTOR_ELEMENTWISE static constexpr float round(float value) noexcept { return value; }
};

template <>
struct ScalarCodec<ScalarType::kBFloat16> {
  using Storage = std::uint16_t;
  CASTOR_ELEMENTWISE static constexpr float load(Storage bits) noexcept {
    return from_bfloat16(bits);
  }
  CASTOR_ELEMENTWISE static constexpr Storage round(float value) noexcept {
    return round_to_bfloat16(value);
  }
};

template <>
struct ScalarCodec<ScalarType::kFloat16> {
  using Storage = std::uint16_t;
  CASTOR_ELEMENTWISE static constexpr float load(Storage bits) noexcept {
    return from_float16(bits);
  }
  CASTOR_ELEMENTWISE static constexpr Storage round(float value) noexcept {
    return round_to_float16(value);
  }
};

}  // namespace castor
