#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "optim/elementwise.h"

namespace castor {

/// Key of the random bits of one parameter's update, which depend on nothing but the key and the
/// element. So the same seed gives the same bits whatever the tasks, the threads, the chunks and
/// the machine.
class RoundingKey {
 public:
  CASTOR_ELEMENTWISE constexpr RoundingKey() noexcept {}

  /// Makes the key of one parameter at one step. `stream` tells the parameters of an optimizer
  /// apart (its index among them); `step` counts from 1.
  CASTOR_ELEMENTWISE constexpr RoundingKey(std::uint64_t seed, std::uint64_t stream,
                                           std::int64_t step) noexcept
      : bits_(mix(mix(mix(seed) + stream) + static_cast<std::uint64_t>(step))) {}

  /// Returns 64 random bits for each counter.
  [[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint64_t at(
      std::uint64_t counter) const noexcept {
    return mix(bits_ + counter);
  }

 private:
  /// Makes a step of splitmix64 (Steele, Lea & Flood 2014, Fast splittable pseudorandom
  /// generators).
  CASTOR_ELEMENTWISE static constexpr std::uint64_t mix(std::uint64_t x) noexcept {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  std::uint64_t bits_ = 0;
};

/// Number of elements that share a RoundingSequence.
inline constexpr std::size_t kRoundingBlock = 1024;

/// Random numbers for consecutive elements, for one addition each: `start + step * x`, modulo 2^32,
/// for element x of its rounding block. The upper bits are used.
///
/// This is multiply-shift hashing (Dietzfelbinger 1996, Universal hashing and k-wise independent
/// random variables via integer arithmetic without primes). With start and step random, the upper
/// 16 or 19 bits of any two elements are uniform and independent, so that their rounding errors add
/// up as independent ones.
struct RoundingSequence {
  /// Begins at element `index` of the parameter.
  CASTOR_ELEMENTWISE RoundingSequence(RoundingKey key, std::uint64_t index) noexcept {
    const std::uint64_t random = key.at(index / kRoundingBlock);
    step = static_cast<std::uint32_t>(random);
    start = static_cast<std::uint32_t>(random >> 32) +
            step * static_cast<std::uint32_t>(index % kRoundingBlock);
  }

  std::uint32_t start;
  std::uint32_t step;
};

namespace detail {

/// Returns one of the two bf16 numbers around `value`, the farther the less likely, so that the
/// mean is exact: `random` is uniform in [0, 2^16). A bf16 number is kept. Beyond the largest bf16
/// the other neighbour is infinity; infinity stays.
///
/// A NaN stays one if its low 16 bits are zero. They are in a NaN that a CPU's arithmetic makes or
/// passes on from bf16 operands; a GPU's are not (0x7fffffff), see plain_nan.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint16_t round_stochastically_to_bfloat16(
    float value, std::uint32_t random) noexcept {
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) + random) >> 16);
}

}  // namespace detail
}  // namespace castor
