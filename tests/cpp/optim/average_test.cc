#include "optim/average.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "optim/rounding.h"
#include "optim/test_support.h"

namespace castor {
namespace {

/// Parts of all magnitudes, with infinities, NaNs and subnormals among them.
std::vector<float> random_parts(std::size_t count) {
  std::mt19937 random(11);
  std::vector<float> values(count);
  for (float& value : values) {
    value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  }
  return values;
}

template <ScalarType type>
void expect_means(std::size_t count, std::size_t numel, Executor* executor) {
  using Codec = ScalarCodec<type>;
  std::vector<typename Codec::Storage> parts;
  for (const float value : random_parts(count * numel)) {
    parts.push_back(Codec::round(value));
  }
  std::vector<typename Codec::Storage> expected(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    float sum = Codec::load(parts[i]);
    for (std::size_t part = 1; part < count; ++part) {
      sum += Codec::load(parts[part * numel + i]);
    }
    expected[i] = Codec::round(sum / static_cast<float>(count));
  }
  const auto same = [](auto a, auto b) {
    const float x = Codec::load(a);
    const float y = Codec::load(b);
    return (std::isnan(x) && std::isnan(y)) ||
           std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  };
  for (const Isa isa : supported_isas()) {
    std::vector<typename Codec::Storage> in_place = parts;
    detail::average(executor,
                    {.parts = in_place.data(),
                     .count = count,
                     .numel = numel,
                     .type = type,
                     .mean = in_place.data(),
                     .divisor = static_cast<float>(count)},
                    isa);
    for (std::size_t i = 0; i < numel; ++i) {
      ASSERT_TRUE(same(in_place[i], expected[i])) << to_string(isa) << ", element " << i;
    }
  }
}

TEST(AverageTest, MeansAreSumsInOrderRoundedOnceWithEveryInstructionSet) {
  testing::BackwardsExecutor executor(3);
  for (const std::size_t count : {1, 2, 3, 4, 7}) {
    for (const std::size_t numel : {1, 1023, 1025, 140000}) {
      expect_means<ScalarType::kFloat32>(count, numel, &executor);
      expect_means<ScalarType::kBFloat16>(count, numel, nullptr);
      expect_means<ScalarType::kFloat16>(count, numel, &executor);
    }
  }
}

template <ScalarType type>
void expect_the_same_in_calls(Executor* executor) {
  constexpr std::size_t kNumel = 140'000;
  constexpr std::size_t kParts = 6;
  using Codec = ScalarCodec<type>;
  std::vector<typename Codec::Storage> parts;
  std::minstd_rand random(3);
  for (std::size_t i = 0; i < kParts * kNumel; ++i) {
    parts.push_back(Codec::round(static_cast<float>(random() % 10'000) / 7.0F));
  }
  std::vector<typename Codec::Storage> at_once(kNumel);
  average(executor, at_once.data(), parts.data(), kParts, kNumel, type);
  std::vector<float> sums(kNumel, -1.0F);
  add_up(executor, sums.data(), false, parts.data(), 2, kNumel, type);
  add_up(executor, sums.data(), true, parts.data() + 2 * kNumel, 3, kNumel, type);
  std::vector<typename Codec::Storage> in_calls(kNumel);
  average_last(executor, in_calls.data(), sums.data(), parts.data() + 5 * kNumel, 1, kParts, kNumel,
               type);
  EXPECT_EQ(in_calls, at_once);
}

TEST(AverageTest, PartsMayComeInSeveralCalls) {
  testing::BackwardsExecutor executor(3);
  expect_the_same_in_calls<ScalarType::kFloat32>(&executor);
  expect_the_same_in_calls<ScalarType::kBFloat16>(&executor);
  expect_the_same_in_calls<ScalarType::kFloat16>(nullptr);
}

TEST(AverageTest, SubnormalsStayAndOverflowIsInfinite) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const float huge = std::numeric_limits<float>::max();
  std::vector<float> parts = {2 * tiny, huge, 2 * tiny, huge};
  average(nullptr, parts.data(), parts.data(), 2, 2, ScalarType::kFloat32);
  EXPECT_EQ(parts[0], 2 * tiny);
  EXPECT_TRUE(std::isinf(parts[1]));
}

}  // namespace
}  // namespace castor
