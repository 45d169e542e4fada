#pragma once

// Internal to csrc/optim and the CUDA kernel: one element at a time.

#include <bit>
#include <cstdint>

#include "optim/elementwise.h"
#include "optim/pairs.h"
#include "optim/rounding.h"

namespace castor::detail {

/// Returns the low half of a master whose rounding to bf16 is kept beside it. bits(master) - (bf16
/// << 16) lies in [-0x8000, 0x7fff] (rounding.h), so its 16 low bits determine it.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::int16_t remainder_of(float master) noexcept {
  return static_cast<std::int16_t>(
      static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(master)));
}

/// Returns `sum`, or the parameter `high` where no master makes that pair.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr float master_or_param(std::uint32_t sum,
                                                                 std::uint32_t high) noexcept {
  const auto master = std::bit_cast<float>(sum);
  return std::bit_cast<float>(blend(master != master, high, sum));
}

/// Returns the master of a bf16 parameter and its remainder. Some pairs have no master: zero with a
/// negative remainder, and infinity with a positive one, whose sum is a NaN. Such a pair comes from
/// a parameter that user code wrote, and the master is the parameter. The same holds where the
/// parameter is NaN.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr float join_master(std::uint16_t param,
                                                             std::int16_t remainder) noexcept {
  const std::uint32_t high = std::uint32_t{param} << 16;
  return master_or_param(high + static_cast<std::uint32_t>(std::int32_t{remainder}), high);
}

/// Applies join_master to two elements. A remainder plus 0x8000 is its bits with the uppermost
/// flipped. So both remainders are flipped at once, fill the lower half of a sum, and lose 0x8000
/// there.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr Pair<float> join_masters(
    std::uint32_t params, std::uint32_t remainders) noexcept {
  const std::uint32_t first = params << 16;
  const std::uint32_t second = params & kUpperHalf;
  const std::uint32_t raised = remainders ^ 0x80008000u;
  return {master_or_param((first | (raised & kLowerHalf)) - 0x8000u, first),
          master_or_param((second | (raised >> 16)) - 0x8000u, second)};
}

/// Applies round_to_bfloat16 to a master that came from join_master and arithmetic. A NaN then has
/// 16 zero low bits and needs no care. A GPU's NaN does not: see plain_nan.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint16_t param_of(float master) noexcept {
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(master) + 0x8000u) >> 16);
}

/// Applies param_of to two masters, and returns a pair.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint32_t params_of(Pair<float> masters) noexcept {
  const Pair<std::uint32_t> bits = bits_of(masters);
  return upper_halves({bits.first + 0x8000u, bits.second + 0x8000u});
}

/// Applies remainder_of to two masters, and returns a pair.
[[nodiscard]] CASTOR_ELEMENTWISE constexpr std::uint32_t remainders_of(
    Pair<float> masters) noexcept {
  return lower_halves(bits_of(masters));
}

}  // namespace castor::detail
