#pragma once

// Internal to csrc/optim and the CUDA kernel: one element at a time.

#include <algorithm>
#include <bit>
#include <cstdint>

#include "optim/elementwise.h"
#include "optim/pairs.h"
#include "optim/rounding.h"

namespace castor::detail {

// The 8-bit maps of split_int8. They are block-wise, dynamic and dense at zero as those of Dettmers
// et al. 2022 (8-bit Optimizers via Block-wise Quantization), but computed as ITU-T G.711
// companding is: add a constant, the knee, and take the floating-point number's upper bits.
//
//   code(x) = (bits(x + knee) - bits(knee)) >> 19        x >= 0, knee a power of two
//   x(code) = float(bits(knee) + (code << 19)) - knee
//
// Codes are equally spaced (knee / 16) below the knee and have 4 bits of mantissa above it. The
// knee follows from the block's largest magnitude, so the scale costs no arithmetic at all. Both
// maps are exact both ways on their own numbers, zero included.

inline constexpr std::uint32_t kCodeShift = 19;  // of the 23 bits of mantissa, 4 stay
inline constexpr std::uint32_t kCodeStep = 1u << kCodeShift;

/// Exponents of a block's knee, which is 2^-kRange of the power of two above the block's largest
/// magnitude. exp_avg has a sign and 7 bits: codes up to 113. exp_avg_sq has 8 bits: codes up to
/// 241. The reach of exp_avg_sq, 2^-19 of the largest, is that of 2^-9.5 of its square root, by
/// which the update divides.
inline constexpr std::uint32_t kExpAvgRange = 7;
inline constexpr std::uint32_t kExpAvgSqRange = 15;

/// Smallest biased exponent of a knee: knees are 2^-122 at least, so that a step (knee / 16) is not
/// subnormal.
inline constexpr std::uint32_t kMinKneeExponent = 5;

/// Returns the bits of |x|: ordered as the magnitudes are, infinity and NaN above them.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint32_t magnitude_bits(float x) noexcept {
  return std::bit_cast<std::uint32_t>(x) & 0x7fffffffu;
}

/// Returns the knee for a block whose largest magnitude has these bits, with any sign; NaN, if that
/// magnitude is not finite.
template <std::uint32_t range>
[[nodiscard]] CASTOR_ELEMENTWISE constexpr float knee_of(std::uint32_t largest_bits) noexcept {
  const std::uint32_t exponent = (largest_bits >> 23) & 0xffu;
  if (exponent == 0xffu)
    return std::bit_cast<float>(0x7fc00000u);
  const std::uint32_t wanted = exponent + 1;
  const std::uint32_t knee = wanted < range + kMinKneeExponent ? kMinKneeExponent : wanted - range;
  return std::bit_cast<float>(knee << 23);
}

// With `random` uniform in [0, kCodeStep), the mean of the result is exact; with kCodeStep / 2 it
// is rounded to nearest. For a NaN knee codes mean nothing, and decoding gives NaN.
//
// The codes of two elements are a 16-bit number, the first in its lower byte. The functions of one
// element and those of two share the steps up to the code in a 32-bit number: from bit kCodeShift
// on, or in the uppermost byte.

/// Returns the magnitude's code, from bit kCodeShift on; the bits below are those rounded off.
[[nodiscard]] CASTOR_ELEMENTWISE std::uint32_t compress_exp_avg(float value, float knee,
                                                                std::uint32_t random) noexcept {
  const float shifted = std::bit_cast<float>(magnitude_bits(value)) + knee;
  return std::bit_cast<std::uint32_t>(shifted) + (random - std::bit_cast<std::uint32_t>(knee));
}

/// Returns the code with sign and magnitude.
[[nodiscard]] CASTOR_ELEMENTWISE std::uint8_t encode_exp_avg(float value, float knee,
                                                             std::uint32_t random) noexcept {
  const std::uint32_t sign = (std::bit_cast<std::uint32_t>(value) >> 24) & 0x80u;
  return static_cast<std::uint8_t>(sign | compress_exp_avg(value, knee, random) >> kCodeShift);
}

/// Applies encode_exp_avg to two values.
[[nodiscard]] CASTOR_ELEMENTWISE std::uint16_t encode_exp_avg(Pair<float> values, float knee,
                                                              Pair<std::uint32_t> random) noexcept {
  const Pair<std::uint32_t> bits = bits_of(values);
  const std::uint32_t first = compress_exp_avg(values.first, knee, random.first);
  const std::uint32_t second = compress_exp_avg(values.second, knee, random.second);
  return static_cast<std::uint16_t>((first >> kCodeShift) |
                                    ((second >> (kCodeShift - 8)) & 0x7f00u) |
                                    ((bits.first >> 24) & 0x80u) | ((bits.second >> 16) & 0x8000u));
}

/// Decodes the code in the uppermost byte, whatever the bits below are.
[[nodiscard]] CASTOR_ELEMENTWISE float expand_exp_avg(std::uint32_t high, float knee) noexcept {
  const std::uint32_t steps = (high >> (24 - kCodeShift)) & (0x7fu << kCodeShift);
  const float magnitude = std::bit_cast<float>(std::bit_cast<std::uint32_t>(knee) + steps) - knee;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | (high & 0x80000000u));
}

[[nodiscard]] CASTOR_ELEMENTWISE float decode_exp_avg(std::uint8_t code, float knee) noexcept {
  return expand_exp_avg(std::uint32_t{code} << 24, knee);
}

/// Applies decode_exp_avg to two codes.
[[nodiscard]] CASTOR_ELEMENTWISE Pair<float> decode_exp_avg(std::uint16_t codes,
                                                            float knee) noexcept {
  return {expand_exp_avg(std::uint32_t{codes} << 24, knee),
          expand_exp_avg(std::uint32_t{codes} << 16, knee)};
}

/// Returns the value of code 0 of exp_avg_sq, where the block is not all zero: half the smallest
/// step. A step of Adam is m / sqrt(v); were v lost while m is not, eps alone would bound it.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr float floor_of(float knee) noexcept {
  return knee * 0x1p-5f;
}

/// Returns the code, from bit kCodeShift on; the bits below are those rounded off. `value` is not
/// negative; below the floor it counts as the floor.
[[nodiscard]] CASTOR_ELEMENTWISE std::uint32_t compress_exp_avg_sq(float value, float knee,
                                                                   std::uint32_t random) noexcept {
  const float sum = value + (knee - floor_of(knee));
  const std::uint32_t bits =
      std::max(std::bit_cast<std::uint32_t>(sum), std::bit_cast<std::uint32_t>(knee));
  return bits + (random - std::bit_cast<std::uint32_t>(knee));
}

[[nodiscard]] CASTOR_ELEMENTWISE std::uint8_t encode_exp_avg_sq(float value, float knee,
                                                                std::uint32_t random) noexcept {
  return static_cast<std::uint8_t>(compress_exp_avg_sq(value, knee, random) >> kCodeShift);
}

/// Applies encode_exp_avg_sq to two values.
[[nodiscard]] CASTOR_ELEMENTWISE std::uint16_t encode_exp_avg_sq(
    Pair<float> values, float knee, Pair<std::uint32_t> random) noexcept {
  const std::uint32_t first = compress_exp_avg_sq(values.first, knee, random.first);
  const std::uint32_t second = compress_exp_avg_sq(values.second, knee, random.second);
  return static_cast<std::uint16_t>((first >> kCodeShift) |
                                    ((second >> (kCodeShift - 8)) & 0xff00u));
}

/// Decodes the code at bit kCodeShift, whatever the bits around it are.
[[nodiscard]] CASTOR_ELEMENTWISE float expand_exp_avg_sq(std::uint32_t shifted,
                                                         float knee) noexcept {
  const std::uint32_t steps = shifted & (0xffu << kCodeShift);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(knee) + steps) - (knee - floor_of(knee));
}

[[nodiscard]] CASTOR_ELEMENTWISE float decode_exp_avg_sq(std::uint8_t code, float knee) noexcept {
  return expand_exp_avg_sq(std::uint32_t{code} << kCodeShift, knee);
}

/// Applies decode_exp_avg_sq to two codes.
[[nodiscard]] CASTOR_ELEMENTWISE Pair<float> decode_exp_avg_sq(std::uint16_t codes,
                                                               float knee) noexcept {
  return {expand_exp_avg_sq(std::uint32_t{codes} << kCodeShift, knee),
          expand_exp_avg_sq(std::uint32_t{codes} << (kCodeShift - 8), knee)};
}

}  // namespace castor::detail
