#pragma once

// Internal to csrc/optim: two consecutive 16-bit elements as one 32-bit number, the first in its
// lower half. A loop over pairs stays in 32-bit lanes from load to store: a shift or a mask makes
// an fp32 of each half. With one element a lane, the elements have to be widened and narrowed by
// shuffles, and a core does half as many of those in a cycle.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "optim/elementwise.h"

namespace castor::detail {

static_assert(std::endian::native == std::endian::little);

template <typename T>
struct Pair {
  T first;
  T second;
};

inline constexpr std::uint32_t kUpperHalf = 0xffff0000u;
inline constexpr std::uint32_t kLowerHalf = 0x0000ffffu;

/// Loads elements 2 * i and 2 * i + 1 of an array of 16-bit elements.
template <typename T>
[[nodiscard]] CASTOR_ELEMENTWISE std::uint32_t load_pair(const T* array, std::size_t i) noexcept {
  static_assert(sizeof(T) == 2);
  std::uint32_t pair;
  std::memcpy(&pair, array + 2 * i, sizeof pair);
  return pair;
}

template <typename T>
CASTOR_ELEMENTWISE void store_pair(T* array, std::size_t i, std::uint32_t pair) noexcept {
  static_assert(sizeof(T) == 2);
  std::memcpy(array + 2 * i, &pair, sizeof pair);
}

/// Applies from_bfloat16 to both elements.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr Pair<float> pair_from_bfloat16(
    std::uint32_t pair) noexcept {
  return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & kUpperHalf)};
}

[[nodiscard]] CASTOR_ELEMENTWISE constexpr Pair<std::uint32_t> bits_of(Pair<float> pair) noexcept {
  return {std::bit_cast<std::uint32_t>(pair.first), std::bit_cast<std::uint32_t>(pair.second)};
}

[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint32_t upper_halves(
    Pair<std::uint32_t> of) noexcept {
  return (of.first >> 16) | (of.second & kUpperHalf);
}

[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint32_t lower_halves(
    Pair<std::uint32_t> of) noexcept {
  return (of.first & kLowerHalf) | (of.second << 16);
}

}  // namespace castor::detail
