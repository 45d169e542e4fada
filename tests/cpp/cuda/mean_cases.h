#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <vector>

#include "optim/average.h"
#include "optim/rounding.h"

namespace castor::testing {

/// Gradients of which a mean is taken.
struct MeanCase {
  ScalarType type{};
  std::size_t count = 0;
  std::size_t numel = 0;
  std::vector<std::byte> parts;
};

/// Calls `work` with gradients of each type and of many numbers of ranks. They have all magnitudes,
/// with infinities, NaNs, subnormals and ties of the rounding among them.
inline void for_each_mean(const std::function<void(const MeanCase&)>& work) {
  std::mt19937 random(17);
  for (const ScalarType type :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
    for (const std::size_t count : {1U, 2U, 3U, 4U, 5U, 7U, 8U, 12U, 64U}) {
      for (const std::size_t numel : {0U, 1U, 31U, 257U, 4099U, 70'001U}) {
        MeanCase one{.type = type, .count = count, .numel = numel, .parts = {}};
        one.parts.resize(count * numel * size_of(type));
        const auto put = [&](std::size_t i, std::uint32_t bits) {
          std::memcpy(one.parts.data() + i * size_of(type), &bits, size_of(type));
        };
        for (std::size_t i = 0; i < count * numel; ++i) {
          put(i, static_cast<std::uint32_t>(random()));  // any bits
          if (i % 3 == 0) {  // near the others: sums that do not vanish beside one of them
            const std::uint32_t near = size_of(type) == 4 ? 0x3f800000U : 0x3c00U;
            put(i, near + static_cast<std::uint32_t>(random() % 64));
          }
        }
        work(one);
      }
    }
  }
}

/// Expects the bits of the host's mean; for a NaN any NaN.
inline void expect_mean(const MeanCase& one, std::span<const std::byte> found) {
  std::vector<std::byte> expected(one.numel * size_of(one.type));
  average(nullptr, expected.data(), one.parts.data(), one.count, one.numel, one.type);
  ASSERT_EQ(found.size(), expected.size());
  const auto load = [&](std::span<const std::byte> values, std::size_t i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, values.data() + i * size_of(one.type), size_of(one.type));
    return one.type == ScalarType::kFloat32    ? std::bit_cast<float>(bits)
           : one.type == ScalarType::kBFloat16 ? from_bfloat16(static_cast<std::uint16_t>(bits))
                                               : from_float16(static_cast<std::uint16_t>(bits));
  };
  for (std::size_t i = 0; i < one.numel; ++i) {
    const float value = load(found, i);
    const float wanted = load(expected, i);
    ASSERT_TRUE((std::isnan(value) && std::isnan(wanted)) ||
                std::bit_cast<std::uint32_t>(value) == std::bit_cast<std::uint32_t>(wanted))
        << to_string(one.type) << " of " << one.count << ", element " << i << " of " << one.numel;
  }
}

}  // namespace castor::testing
