#pragma once

// Internal to csrc/cuda; contains nothing but plain C++.
//
// Adds doubles that are not negative one after the other, by many threads at once, with the bits of
// one thread's additions. While the total stays between two powers of two, it is a whole number of
// units (of its last bit), and an addition adds a whole number of them too: the addend rounded to
// units, a tie to the even total. So all that an addition asks of the total is whether it is even,
// and a run of additions is a pair of numbers, one for an even total and one for an odd. Such pairs
// are composed in any grouping, as a parallel scan does. The one addition that takes the total to
// the next power of two is done as it is, and the rest goes on in larger units.

#include <bit>
#include <cstdint>

#include "optim/elementwise.h"

namespace castor::cuda {

/// Bits of a double's significand, with the leading one.
inline constexpr unsigned kSignificandBits = 53;
/// Units of a total that has reached the next power of two.
inline constexpr std::uint64_t kEndOfUnits = std::uint64_t{1} << kSignificandBits;
/// Greatest number of units: more count as so many. It takes any total past kEndOfUnits.
inline constexpr std::uint64_t kManyUnits = kEndOfUnits << 1;

/// A double that is finite and not negative: `count` units of 2^(exponent - 1075).
struct Units {
  std::uint64_t count;
  std::uint32_t exponent;  ///< at least 1, which is that of subnormal numbers too
};

[[nodiscard]] CASTOR_ELEMENTWISE Units units_of(double value) noexcept {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const auto biased = static_cast<std::uint32_t>(bits >> (kSignificandBits - 1));
  const std::uint64_t leading = std::uint64_t{1} << (kSignificandBits - 1);
  const std::uint64_t fraction = bits & (leading - 1);
  return biased == 0 ? Units{fraction, 1} : Units{fraction | leading, biased};
}

/// REQUIRES units.count < kEndOfUnits, and what units_of() promises of small counts.
[[nodiscard]] CASTOR_ELEMENTWISE double value_of(Units units) noexcept {
  const std::uint64_t exponent = units.exponent - 1;  // the leading one adds 1
  return std::bit_cast<double>((exponent << (kSignificandBits - 1)) + units.count);
}

/// Units that additions add to a total.
struct Additions {
  std::uint64_t to_even;
  std::uint64_t to_odd;
};

/// Returns one addition of `addend`, which is not negative, in units of `exponent`. An infinity or
/// NaN counts as kManyUnits.
[[nodiscard]] CASTOR_ELEMENTWISE Additions additions_of(double addend,
                                                        std::uint32_t exponent) noexcept {
  const Units units = units_of(addend);
  if (units.exponent > exponent)
    return {kManyUnits, kManyUnits};
  const std::uint32_t shift = exponent - units.exponent;
  if (shift > kSignificandBits)
    return {0, 0};  // less than half a unit
  const std::uint64_t whole = units.count >> shift;
  const std::uint64_t twice = (units.count - (whole << shift)) << 1;
  const std::uint64_t unit = std::uint64_t{1} << shift;
  const std::uint64_t up = twice > unit ? 1 : 0;
  const std::uint64_t tie = twice == unit ? 1 : 0;
  return {whole + up + (tie & whole), whole + up + (tie & (whole + 1))};
}

/// Returns `first`, and `second` after it.
[[nodiscard]] CASTOR_ELEMENTWISE Additions then(Additions first, Additions second) noexcept {
  const auto least = [](std::uint64_t count) { return count < kManyUnits ? count : kManyUnits; };
  return {least(first.to_even + (first.to_even % 2 == 0 ? second.to_even : second.to_odd)),
          least(first.to_odd + (first.to_odd % 2 == 0 ? second.to_odd : second.to_even))};
}

/// Returns the units of a total of `count` after the additions; kEndOfUnits or more where one of
/// them takes it there.
[[nodiscard]] CASTOR_ELEMENTWISE std::uint64_t after(std::uint64_t count,
                                                     Additions additions) noexcept {
  const std::uint64_t sum = count + (count % 2 == 0 ? additions.to_even : additions.to_odd);
  return sum < kManyUnits ? sum : kManyUnits;
}

}  // namespace castor::cuda
