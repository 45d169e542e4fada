#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/error.h"
#include "optim/adam_reference.h"
#include "optim/block_moments.h"
#include "optim/dispatch.h"
#include "optim/state_convert.h"
#include "optim/stochastic.h"
#include "optim/test_support.h"

namespace castor {
namespace {

using testing::kInfinity;
using testing::kNaN;

TEST(RoundingSequenceTest, IsAFunctionOfSeedStreamStepAndElement) {
  const RoundingSequence one(RoundingKey(1, 2, 3), 5000);
  for (const RoundingKey key : {RoundingKey(2, 2, 3), RoundingKey(1, 3, 3), RoundingKey(1, 2, 4)})
    EXPECT_NE(RoundingSequence(key, 5000).start, one.start);
  const RoundingSequence block(RoundingKey(1, 2, 3), 4096);
  EXPECT_EQ(one.start, block.start + (5000 - 4096) * block.step);
}

TEST(RoundingSequenceTest, NumbersAreUniformAndPairsIndependent) {
  constexpr int kDraws = 200'000;
  double sum = 0;
  double product = 0;
  for (int step = 1; step <= kDraws; ++step) {
    const RoundingSequence random(RoundingKey(1, 0, step), 17);
    const double a = (random.start >> 16) / 65536.0 - 0.5;
    const double b = ((random.start + random.step) >> 16) / 65536.0 - 0.5;
    sum += a;
    product += a * b;
  }
  // Variances 1/12 and 1/144.
  EXPECT_LT(std::fabs(sum), 4 * std::sqrt(kDraws / 12.0));
  EXPECT_LT(std::fabs(product), 4 * std::sqrt(kDraws / 144.0));
}

TEST(StochasticRoundingTest, BFloat16IsUnbiased) {
  std::mt19937 values(5);
  std::normal_distribution<float> normal;
  constexpr int kDraws = 20'000;
  for (int sample = 0; sample < 50; ++sample) {
    const float value = normal(values);
    const auto low = testing::reference_load(
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16),
        ScalarType::kBFloat16);
    const float next = std::bit_cast<float>(std::bit_cast<std::uint32_t>(low) + 0x10000u);
    double sum = 0;
    for (int step = 1; step <= kDraws; ++step) {
      const RoundingSequence random(RoundingKey(3, 0, step), static_cast<std::uint64_t>(sample));
      const float rounded = testing::reference_load(
          detail::round_stochastically_to_bfloat16(value, random.start >> 16),
          ScalarType::kBFloat16);
      ASSERT_TRUE(rounded == low || rounded == next);
      sum += rounded;
    }
    const double p = (value - low) / (next - low);
    const double sigma = std::fabs(next - low) * std::sqrt(p * (1 - p) / kDraws);
    EXPECT_LE(std::fabs(sum / kDraws - value), 4 * sigma + 1e-12) << value;
  }
}

TEST(StochasticRoundingTest, BFloat16NumbersInfinitiesAndNaNsStay) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value =
        testing::reference_load(static_cast<std::uint16_t>(bits), ScalarType::kBFloat16);
    const std::uint16_t rounded = detail::round_stochastically_to_bfloat16(value, 0xffff);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(from_bfloat16(rounded)));
    } else {
      ASSERT_EQ(rounded, bits);
    }
  }
}

TEST(BlockMomentsTest, CodesOfBothMapsReadAndWriteExactly) {
  const detail::ScopedFlushToZero flush;
  for (const float knee : {0x1p-122f, 0x1p-60f, 1.0f, 0x1p100f}) {
    for (std::uint32_t code = 0; code <= 0xff; ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      for (const std::uint32_t random : {0u, detail::kCodeStep / 2, detail::kCodeStep - 1}) {
        const float m = detail::decode_exp_avg(byte, knee);
        EXPECT_EQ(detail::encode_exp_avg(m, knee, random), byte);
        const float v = detail::decode_exp_avg_sq(byte, knee);
        EXPECT_EQ(detail::encode_exp_avg_sq(v, knee, random), byte);
        EXPECT_EQ(std::signbit(m), code >= 0x80);
        EXPECT_GE(v, 0.0f);
      }
    }
  }
}

TEST(BlockMomentsTest, StochasticCodesAreUnbiased) {
  std::mt19937 values(6);
  std::uniform_real_distribution<float> exponent(-22.0f, -0.01f);
  constexpr int kDraws = 20'000;
  for (int sample = 0; sample < 50; ++sample) {
    const float value = std::exp2(exponent(values));
    const float m_knee = 0x1p-7f;
    const float v_knee = 0x1p-15f;
    double m_sum = 0;
    double v_sum = 0;
    for (int step = 1; step <= kDraws; ++step) {
      const RoundingSequence random(RoundingKey(4, 0, step), static_cast<std::uint64_t>(sample));
      const std::uint32_t bits = random.start >> (32 - detail::kCodeShift);
      m_sum += detail::decode_exp_avg(detail::encode_exp_avg(-value, m_knee, bits), m_knee);
      v_sum += detail::decode_exp_avg_sq(detail::encode_exp_avg_sq(value, v_knee, bits), v_knee);
    }
    // At most half a step of deviation; a step is a sixteenth of what it is next to and the knee.
    EXPECT_LE(std::fabs(m_sum / kDraws + value),
              4 * (value + m_knee) / 16 / 2 / std::sqrt(double{kDraws}));
    const float floored = std::max(value, detail::floor_of(v_knee));
    EXPECT_LE(std::fabs(v_sum / kDraws - floored),
              4 * (value + v_knee) / 16 / 2 / std::sqrt(double{kDraws}));
  }
}

struct Blocks {
  explicit Blocks(std::size_t numel)
      : exp_avg(numel), exp_avg_sq(numel), scales(num_moment_blocks(numel)) {}
  [[nodiscard]] MomentArrays arrays() {
    return {.format = StateFormat::kSplitInt8,
            .exp_avg = exp_avg.data(),
            .exp_avg_sq = exp_avg_sq.data(),
            .scales = scales.data(),
            .numel = exp_avg.size()};
  }
  std::vector<std::uint8_t> exp_avg, exp_avg_sq;
  std::vector<MomentScales> scales;
};

TEST(BlockMomentsTest, ErrorStaysWithinHalfAStepOfTheBlock) {
  constexpr std::size_t kNumel = 100 * kMomentBlock + 77;
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  std::vector<float> m(kNumel), v(kNumel), m_read(kNumel), v_read(kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) {
    const float size = std::exp2(static_cast<float>(i / kMomentBlock) - 60.0f);
    m[i] = size * normal(random);
    v[i] = size * size * std::pow(normal(random), 2.0f);
  }
  Blocks blocks(kNumel);
  store_moments(nullptr, blocks.arrays(), m.data(), v.data());
  load_moments(nullptr, blocks.arrays(), m_read.data(), v_read.data());
  for (std::size_t begin = 0; begin < kNumel; begin += kMomentBlock) {
    const std::size_t end = std::min(begin + kMomentBlock, kNumel);
    float m_max = 0;
    float v_max = 0;
    for (std::size_t i = begin; i < end; ++i) {
      m_max = std::max(m_max, std::fabs(m[i]));
      v_max = std::max(v_max, v[i]);
    }
    for (std::size_t i = begin; i < end; ++i) {
      ASSERT_LE(std::fabs(m_read[i] - m[i]), std::fabs(m[i]) / 32 + m_max / 2048) << i;
      // Below 2^-122 knees do not shrink further.
      ASSERT_LE(std::fabs(v_read[i] - v[i]), v[i] / 32 + v_max * 0x1p-19f + 0x1p-126f) << i;
    }
  }
}

TEST(BlockMomentsTest, WhatWasLoadedComesBackBitForBitWithItsScales) {
  constexpr std::size_t kNumel = 300 * kMomentBlock + 3;
  std::mt19937 random(9);
  std::vector<float> m(kNumel), v(kNumel);
  Blocks blocks(kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) {
    // As stochastic rounding leaves them: the largest codes may be over or under the power of two.
    blocks.exp_avg[i] = static_cast<std::uint8_t>(random() % 2 * 0x80 + random() % 90);
    blocks.exp_avg_sq[i] = static_cast<std::uint8_t>(random() % 200);
  }
  for (std::size_t block = 0; block < blocks.scales.size(); ++block) {
    blocks.exp_avg[block * kMomentBlock] = static_cast<std::uint8_t>(96 + random() % 18);
    blocks.exp_avg_sq[block * kMomentBlock] = static_cast<std::uint8_t>(224 + random() % 18);
    blocks.scales[block] = {std::exp2(static_cast<float>(random() % 200) - 100.0f),
                            std::exp2(static_cast<float>(random() % 200) - 100.0f)};
  }
  load_moments(nullptr, blocks.arrays(), m.data(), v.data());
  Blocks again(kNumel);
  again.scales = blocks.scales;
  store_moments(nullptr, again.arrays(), m.data(), v.data());
  EXPECT_EQ(again.exp_avg, blocks.exp_avg);
  EXPECT_EQ(again.exp_avg_sq, blocks.exp_avg_sq);
  for (std::size_t block = 0; block < blocks.scales.size(); ++block) {
    ASSERT_EQ(again.scales[block].exp_avg, blocks.scales[block].exp_avg);
    ASSERT_EQ(again.scales[block].exp_avg_sq, blocks.scales[block].exp_avg_sq);
  }
}

TEST(BlockMomentsTest, ABlockOfZerosIsZeroAndABlockWithANaNIsNaN) {
  std::vector<float> m(3 * kMomentBlock), v(3 * kMomentBlock);
  v[kMomentBlock] = kInfinity;
  m[kMomentBlock + 1] = kNaN;
  Blocks blocks(m.size());
  store_moments(nullptr, blocks.arrays(), m.data(), v.data());
  load_moments(nullptr, blocks.arrays(), m.data(), v.data());
  for (std::size_t i = 0; i < m.size(); ++i) {
    const bool spoilt = i / kMomentBlock == 1;
    ASSERT_EQ(std::isnan(m[i]), spoilt);
    ASSERT_EQ(std::isnan(v[i]), spoilt);
    ASSERT_TRUE(spoilt || (m[i] == 0.0f && v[i] == 0.0f));
  }
}

TEST(BlockMomentsTest, ANegativeMeanOfSquaresIsRefused) {
  std::vector<float> m(10), v(10);
  v[7] = -1e-30f;
  Blocks blocks(10);
  EXPECT_THROW(store_moments(nullptr, blocks.arrays(), m.data(), v.data()), InvalidArgument);
}

}  // namespace
}  // namespace castor
