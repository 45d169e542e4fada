#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "optim/adam.h"
#include "optim/adam_reference.h"
#include "optim/dispatch.h"
#include "optim/state_convert.h"
#include "optim/test_support.h"

namespace castor {
namespace {

using testing::Array;
using testing::BackwardsExecutor;
using testing::bits_of;
using testing::InlineExecutor;
using testing::kInfinity;
using testing::kNaN;
using testing::reference_load;
using testing::reference_round;

constexpr ScalarType kBf16 = ScalarType::kBFloat16;

constexpr StateFormat kFormats[] = {StateFormat::kFp32, StateFormat::kSplit,
                                    StateFormat::kSplitBf16, StateFormat::kSplitInt8};

/// One bf16 parameter with its state in a format.
struct SplitParameter {
  SplitParameter(std::size_t numel, StateFormat state_format, std::size_t skew = 0,
                 unsigned seed = 7)
      : format(state_format),
        param(numel, skew),
        grad(numel, 3 * skew),
        master(format == StateFormat::kFp32 ? numel : 0, skew),
        remainder(format == StateFormat::kFp32 ? 0 : numel, 5 * skew),
        exp_avg(numel * state_bytes(format).exp_avg, 0),
        exp_avg_sq(numel * state_bytes(format).exp_avg_sq, 0),
        scales(format == StateFormat::kSplitInt8 ? num_moment_blocks(numel) : 0) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel; ++i)
      set_master(i, normal(random));
    set_grads(seed);
  }

  [[nodiscard]] std::size_t numel() const { return param.size(); }

  void set_grads(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel(); ++i)
      grad[i] = reference_round(0.01f * normal(random), kBf16);
  }

  void set_master(std::size_t i, float value) {
    param[i] = reference_round(value, kBf16);
    if (format == StateFormat::kFp32) {
      master[i] = value;
    } else {
      split_masters(nullptr, remainder.data() + i, &value, 1);
    }
  }

  [[nodiscard]] float master_at(std::size_t i) const {
    if (format == StateFormat::kFp32)
      return master[i];
    float value = 0;
    join_masters(nullptr, &value, param.data() + i, remainder.data() + i, 1);
    return value;
  }

  [[nodiscard]] MomentArrays moments() {
    return {.format = format,
            .exp_avg = exp_avg.data(),
            .exp_avg_sq = exp_avg_sq.data(),
            .scales = scales.size() == 0 ? nullptr : scales.data(),
            .numel = numel()};
  }

  [[nodiscard]] AdamSegment segment(const AdamCoefficients& coefficients, std::int64_t step,
                                    std::size_t begin, std::size_t end) {
    const StateBytes bytes = state_bytes(format);
    return {.master = format == StateFormat::kFp32 ? master.data() + begin : nullptr,
            .exp_avg = exp_avg.data() + begin * bytes.exp_avg,
            .exp_avg_sq = exp_avg_sq.data() + begin * bytes.exp_avg_sq,
            .grad = grad.data() + begin,
            .param = param.data() + begin,
            .type = kBf16,
            .numel = end - begin,
            .coefficients = coefficients,
            .format = format,
            .remainder = format == StateFormat::kFp32 ? nullptr : remainder.data() + begin,
            .scales = scales.size() == 0 ? nullptr : scales.data() + begin / kMomentBlock,
            .rounding = RoundingKey(99, 3, step),
            .first_element = begin};
  }

  void update(const AdamOptions& options, std::int64_t step, Isa isa) {
    InlineExecutor executor;
    const AdamSegment all = segment(AdamCoefficients(options, step, 1.0), step, 0, numel());
    detail::adam_update(executor, {&all, 1}, isa);
  }

  [[nodiscard]] bool same_bits(const SplitParameter& other) const {
    return param.same_bits(other.param) && master.same_bits(other.master) &&
           remainder.same_bits(other.remainder) && exp_avg.same_bits(other.exp_avg) &&
           exp_avg_sq.same_bits(other.exp_avg_sq) && scales.same_bits(other.scales);
  }

  [[nodiscard]] bool guards_intact() const {
    return param.guards_intact() && remainder.guards_intact() && exp_avg.guards_intact() &&
           exp_avg_sq.guards_intact() && scales.guards_intact() && master.guards_intact();
  }

  StateFormat format;
  Array<std::uint16_t> param, grad;
  Array<float> master;
  Array<std::int16_t> remainder;
  Array<std::byte> exp_avg, exp_avg_sq;
  Array<MomentScales> scales;
};

AdamOptions options_with(WeightDecayMode mode) {
  return {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .mode = mode};
}

class AdamSplitTest : public ::testing::TestWithParam<std::tuple<Isa, StateFormat>> {
 protected:
  [[nodiscard]] static Isa isa() { return std::get<0>(GetParam()); }
  [[nodiscard]] static StateFormat format() { return std::get<1>(GetParam()); }
};

TEST_P(AdamSplitTest, GivesTheBaselinesBitsAtEveryLength) {
  for (const WeightDecayMode mode : {WeightDecayMode::kDecoupled, WeightDecayMode::kL2}) {
    for (std::size_t numel = 0; numel < 2 * kMomentBlock + 40; numel += numel < 70 ? 1 : 37) {
      SplitParameter parameter(numel, format(), 1, static_cast<unsigned>(numel));
      SplitParameter expected = parameter;
      for (std::int64_t step = 1; step <= 3; ++step) {
        parameter.update(options_with(mode), step, isa());
        expected.update(options_with(mode), step, Isa::kBaseline);
      }
      ASSERT_TRUE(parameter.same_bits(expected)) << numel;
      ASSERT_TRUE(parameter.guards_intact()) << numel;
    }
  }
}

TEST_P(AdamSplitTest, GivesTheBaselinesBitsFromGradientsOfAllMagnitudesAndWrittenParameters) {
  // beta1 on both sides of 0.5: the lerp starts from the moment or from the gradient.
  for (const double beta1 : {0.9, 0.3}) {
    for (const WeightDecayMode mode : {WeightDecayMode::kDecoupled, WeightDecayMode::kL2}) {
      AdamOptions options = options_with(mode);
      options.beta1 = beta1;
      SplitParameter parameter(5 * kMomentBlock + 40, format());
      SplitParameter expected = parameter;
      std::mt19937 random(17);
      for (std::int64_t step = 1; step <= 20; ++step) {
        for (std::size_t i = 0; i < parameter.numel(); ++i) {
          // Down to subnormals; squares stay finite. Whole blocks of zeros, too.
          const bool is_zero = (i / kMomentBlock + static_cast<std::size_t>(step)) % 4 == 0;
          parameter.grad[i] =
              static_cast<std::uint16_t>(is_zero ? 0 : (random() & 0x8000u) | random() % 0x5b00u);
          expected.grad[i] = parameter.grad[i];
          // As user code may. kL2 has the weight in its moments: no larger than the gradients.
          const auto bits = static_cast<std::uint16_t>(
              random() & (mode == WeightDecayMode::kL2 ? 0xdaffu : 0xffffu));
          if (random() % 16 == 0)
            parameter.param[i] = expected.param[i] = bits;
          if (random() % 16 == 0)
            parameter.param[i] = expected.param[i] = static_cast<std::uint16_t>(bits & 0x8000u);
        }
        parameter.update(options, step, isa());
        expected.update(options, step, Isa::kBaseline);
        ASSERT_TRUE(parameter.same_bits(expected)) << "step " << step << ", beta1 " << beta1;
      }
    }
  }
}

TEST_P(AdamSplitTest, BitsDependNeitherOnTheCutNorOnTheThreads) {
  constexpr std::size_t kNumel = 300'011;
  const AdamCoefficients coefficients(options_with(WeightDecayMode::kDecoupled), 1, 0.5);
  SplitParameter whole(kNumel, format());
  const SplitParameter before = whole;
  InlineExecutor inline_executor;
  const AdamSegment all = whole.segment(coefficients, 1, 0, kNumel);
  detail::adam_update(inline_executor, {&all, 1}, isa());
  std::mt19937 random(11);
  for (const std::size_t longest : {7u, 1000u, 200'000u}) {
    SplitParameter cut = before;
    // split_int8 is cut between blocks, the others anywhere.
    const std::size_t unit = format() == StateFormat::kSplitInt8 ? kMomentBlock : 1;
    std::vector<AdamSegment> segments;
    for (std::size_t begin = 0; begin < kNumel;) {
      const std::size_t end = std::min(kNumel, begin + random() % longest * unit);
      segments.push_back(cut.segment(coefficients, 1, begin, end));
      begin = end;
    }
    std::ranges::shuffle(segments, random);
    BackwardsExecutor executor(4);
    detail::adam_update(executor, segments, isa());
    EXPECT_TRUE(cut.same_bits(whole)) << longest;
  }
}

TEST_P(AdamSplitTest, ANonFiniteGradientSpoilsItsElementAndNothingBeyondItsBlock) {
  for (const float bad : {kNaN, kInfinity, -kInfinity}) {
    SplitParameter parameter(2 * kMomentBlock + 5, format());
    const SplitParameter before = parameter;
    constexpr std::size_t kBad = kMomentBlock + 17;
    parameter.grad[kBad] = reference_round(bad, kBf16);
    for (std::int64_t step = 1; step <= 2; ++step)
      parameter.update(options_with(WeightDecayMode::kDecoupled), step, isa());
    EXPECT_TRUE(std::isnan(parameter.master_at(kBad)));
    EXPECT_TRUE(std::isnan(reference_load(parameter.param[kBad], kBf16)));
    for (std::size_t i = 0; i < parameter.numel(); ++i) {
      const bool may_be_spoilt =
          format() == StateFormat::kSplitInt8 ? i / kMomentBlock == 1 : i == kBad;
      ASSERT_TRUE(may_be_spoilt || std::isfinite(parameter.master_at(i))) << i;
    }
  }
}

TEST_P(AdamSplitTest, StaysNearDoublePrecisionOver50Steps) {
  constexpr std::size_t kNumel = 2000;
  const AdamOptions options{.lr = 1e-3};
  SplitParameter parameter(kNumel, format());
  std::vector<testing::DoubleAdam> exact(kNumel);
  for (std::size_t i = 0; i < kNumel; ++i)
    exact[i].weight = parameter.master_at(i);
  for (std::int64_t step = 1; step <= 50; ++step) {
    parameter.set_grads(static_cast<unsigned>(step));
    for (std::size_t i = 0; i < kNumel; ++i)
      exact[i].step(reference_load(parameter.grad[i], kBf16), options, step);
    parameter.update(options, step, isa());
  }
  double error = 0;
  double moved = 0;
  const SplitParameter start(kNumel, format());
  for (std::size_t i = 0; i < kNumel; ++i) {
    error += std::pow(parameter.master_at(i) - exact[i].weight, 2);
    moved += std::pow(exact[i].weight - start.master_at(i), 2);
  }
  // Relative to the way the weights went.
  const double limit = format() == StateFormat::kSplitInt8   ? 0.05
                       : format() == StateFormat::kSplitBf16 ? 0.01
                                                             : 1e-4;
  EXPECT_LT(std::sqrt(error / moved), limit);
}

// A step changes exp_avg_sq by a thousandth, less than half a step of bf16 or of 8 bits: rounded to
// nearest it would stand still.
TEST_P(AdamSplitTest, SmallChangesOfTheMomentsAddUpOnAverage) {
  constexpr std::size_t kNumel = 4096;
  constexpr int kSteps = 1000;
  const AdamOptions options{.lr = 0.0, .beta1 = 0.999, .beta2 = 0.999};
  SplitParameter parameter(kNumel, format());
  std::vector<float> m(kNumel, -0.003f), v(kNumel, 1.7e-5f);
  store_moments(nullptr, parameter.moments(), m.data(), v.data());
  load_moments(nullptr, parameter.moments(), m.data(), v.data());
  const double shrunk = std::pow(0.999, kSteps);
  const double m_expected = m[0] * shrunk;
  const double v_expected = v[0] * shrunk;
  for (std::size_t i = 0; i < kNumel; ++i)
    parameter.grad[i] = 0;
  for (std::int64_t step = 1; step <= kSteps; ++step)
    parameter.update(options, step, isa());
  load_moments(nullptr, parameter.moments(), m.data(), v.data());
  const double m_mean = std::accumulate(m.begin(), m.end(), 0.0) / kNumel;
  const double v_mean = std::accumulate(v.begin(), v.end(), 0.0) / kNumel;
  // Four deviations of the mean of 4096 walks of 1000 steps.
  EXPECT_NEAR(m_mean / m_expected, 1.0, 0.02);
  EXPECT_NEAR(v_mean / v_expected, 1.0, 0.02);
}

TEST_P(AdamSplitTest, AClearedParameterClearsItsMaster) {
  for (const float written : {0.0f, -0.0f}) {
    SplitParameter parameter(1000, format());
    for (std::size_t i = 0; i < 1000; ++i) {
      parameter.grad[i] = 0;
      parameter.set_master(
          i, std::bit_cast<float>(0x3f800000u + static_cast<std::uint32_t>(i * 65521u % 0x10000u)));
    }
    for (std::size_t i = 0; i < 1000; i += 3)
      parameter.param[i] = reference_round(written, kBf16);
    const SplitParameter before = parameter;
    parameter.update({.lr = 0.0}, 1, isa());
    for (std::size_t i = 0; i < 1000; ++i) {
      const float expected = i % 3 == 0 ? written : before.master_at(i);
      ASSERT_EQ(bits_of(parameter.master_at(i)), bits_of(expected)) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EverySupportedIsa, AdamSplitTest,
                         ::testing::Combine(::testing::ValuesIn(supported_isas().begin(),
                                                                supported_isas().end()),
                                            ::testing::ValuesIn(kFormats)),
                         [](const auto& test) {
                           return std::string(to_string(std::get<0>(test.param))) + "_" +
                                  std::string(to_string(std::get<1>(test.param)));
                         });

class SplitInt8Test : public ::testing::TestWithParam<Isa> {};

TEST_P(SplitInt8Test, GivesTheBaselinesBitsFromAnyCodes) {
  constexpr std::size_t kNumel = 1024 * kMomentBlock;
  SplitParameter parameter(kNumel, StateFormat::kSplitInt8);
  std::mt19937 random(19);
  for (std::size_t i = 0; i < kNumel; ++i) {
    parameter.exp_avg[i] = static_cast<std::byte>(random());
    parameter.exp_avg_sq[i] = static_cast<std::byte>(random());
    parameter.remainder[i] = static_cast<std::int16_t>(random());
  }
  // Knees: powers of two.
  for (std::size_t i = 0; i < parameter.scales.size(); ++i)
    parameter.scales[i] = {std::ldexp(1.0f, -122 + static_cast<int>(random() % 180)),
                           std::ldexp(1.0f, -122 + static_cast<int>(random() % 180))};
  SplitParameter expected = parameter;
  parameter.update(options_with(WeightDecayMode::kDecoupled), 3, GetParam());
  expected.update(options_with(WeightDecayMode::kDecoupled), 3, Isa::kBaseline);
  EXPECT_TRUE(parameter.same_bits(expected));
}

TEST_P(SplitInt8Test, ASubnormalWeightDecayIsNone) {
  AdamOptions options = options_with(WeightDecayMode::kL2);
  options.weight_decay = 1e-40;
  SplitParameter parameter(2 * kMomentBlock + 5, StateFormat::kSplitInt8);
  for (std::size_t i = 3; i < parameter.numel(); i += kMomentBlock)
    parameter.param[i] = reference_round(kInfinity, kBf16);
  parameter.update(options, 1, GetParam());
  for (std::size_t i = 0; i < parameter.scales.size(); ++i) {
    EXPECT_TRUE(std::isfinite(parameter.scales[i].exp_avg)) << i;
    EXPECT_TRUE(std::isfinite(parameter.scales[i].exp_avg_sq)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(EverySupportedIsa, SplitInt8Test,
                         ::testing::ValuesIn(supported_isas().begin(), supported_isas().end()),
                         [](const auto& test) { return std::string(to_string(test.param)); });

class SplitIsFp32Test : public ::testing::TestWithParam<Isa> {};

/// Every master and moment equal, bit for bit (of NaNs, that they are).
::testing::AssertionResult same_trajectory(SplitParameter& fp32, SplitParameter& split) {
  std::vector<float> moments[2][2];
  SplitParameter* const both[] = {&fp32, &split};
  for (int k = 0; k < 2; ++k) {
    moments[k][0].resize(fp32.numel());
    moments[k][1].resize(fp32.numel());
    load_moments(nullptr, both[k]->moments(), moments[k][0].data(), moments[k][1].data());
  }
  const auto same = [](float a, float b) {
    return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b));
  };
  for (std::size_t i = 0; i < fp32.numel(); ++i) {
    const bool equal = same(fp32.master_at(i), split.master_at(i)) &&
                       same(moments[0][0][i], moments[1][0][i]) &&
                       same(moments[0][1][i], moments[1][1][i]);
    if (!equal)
      return ::testing::AssertionFailure()
             << "element " << i << ": " << fp32.master_at(i) << " and " << split.master_at(i);
  }
  return ::testing::AssertionSuccess();
}

TEST_P(SplitIsFp32Test, TheTrajectoryIsTheSameBitForBit) {
  for (const WeightDecayMode mode : {WeightDecayMode::kDecoupled, WeightDecayMode::kL2}) {
    SplitParameter fp32(5003, StateFormat::kFp32);
    SplitParameter split(5003, StateFormat::kSplit);
    std::mt19937 random(3);
    for (std::size_t i = 0; i < fp32.numel(); ++i) {
      float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
      if (i % 5 == 0)  // an exact tie
        value = std::bit_cast<float>((bits_of(value) & 0xffff0000u) | 0x8000u);
      if (i % 7 == 0)  // subnormal
        value = std::bit_cast<float>(bits_of(value) & 0x807fffffu);
      if (i % 11 == 0)  // rounds to infinity
        value = i % 2 == 0 ? 3.4e38f : -3.4e38f;
      if (i % 13 == 0)
        value = i % 2 == 0 ? kInfinity : -kInfinity;
      if (std::isnan(value))
        value = 1.5f;
      fp32.set_master(i, value);
      split.set_master(i, value);
    }
    for (std::int64_t step = 1; step <= 60; ++step) {
      for (SplitParameter* parameter : {&fp32, &split}) {
        parameter->set_grads(static_cast<unsigned>(step));
        for (std::size_t i = 0; i < 40; ++i)  // subnormal gradients and tiny squares
          parameter->grad[i * 17] = static_cast<std::uint16_t>(i < 20 ? i : 0x1c00 + i);
        // User code clears some weights, as for a padding row.
        for (std::size_t i = 0; step % 10 == 0 && i < parameter->numel(); i += 9)
          parameter->param[i] = 0;
        parameter->update(options_with(mode), step, GetParam());
      }
      ASSERT_TRUE(same_trajectory(fp32, split)) << "step " << step;
    }
  }
}

TEST_P(SplitIsFp32Test, AnEditIsOffByItsStaleRemainderUntilThatIsForgotten) {
  SplitParameter fp32(4096, StateFormat::kFp32);
  SplitParameter split(4096, StateFormat::kSplit);
  for (SplitParameter* parameter : {&fp32, &split})
    parameter->update({.lr = 1e-2}, 1, GetParam());
  const SplitParameter before = split;
  for (std::size_t i = 0; i < 4096; i += 2) {
    const std::uint16_t edited = reference_round(0.75f * split.master_at(i), kBf16);
    fp32.param[i] = edited;
    split.param[i] = edited;
  }
  for (std::size_t i = 0; i < 4096; ++i) {
    const float written = reference_load(split.param[i], kBf16);
    if (i % 2 == 1) {
      ASSERT_EQ(bits_of(split.master_at(i)), bits_of(fp32.master_at(i)));
    } else {  // half a bf16 step, and it rounds to what was written
      ASSERT_LE(std::fabs(split.master_at(i) - written), std::fabs(written) / 128);
      ASSERT_EQ(reference_round(split.master_at(i), kBf16), split.param[i]);
    }
  }
  forget_remainders(nullptr, split.remainder.data(), before.param.data(), split.param.data(), 4096);
  for (SplitParameter* parameter : {&fp32, &split})
    parameter->update({.lr = 1e-2}, 2, GetParam());
  EXPECT_TRUE(same_trajectory(fp32, split));
}

INSTANTIATE_TEST_SUITE_P(EverySupportedIsa, SplitIsFp32Test,
                         ::testing::ValuesIn(supported_isas().begin(), supported_isas().end()),
                         [](const auto& test) { return std::string(to_string(test.param)); });

TEST(AdamSegmentTest, WhatAFormatDoesNotHaveIsRefused) {
  InlineExecutor executor;
  const AdamCoefficients coefficients({}, 1, 1.0);
  const auto refuses = [&](const AdamSegment& segment) {
    EXPECT_THROW(adam_update(executor, {&segment, 1}), InvalidArgument);
  };
  for (const StateFormat format : kFormats) {
    SplitParameter parameter(10, format);
    const AdamSegment good = parameter.segment(coefficients, 1, 0, 10);
    float master = 0;
    std::int16_t remainder = 0;
    MomentScales scales;
    AdamSegment both = good;
    both.master = &master;
    both.remainder = &remainder;
    refuses(both);
    AdamSegment neither = good;
    neither.master = nullptr;
    neither.remainder = nullptr;
    refuses(neither);
    AdamSegment other_scales = good;
    other_scales.scales = format == StateFormat::kSplitInt8 ? nullptr : &scales;
    refuses(other_scales);
    if (format == StateFormat::kFp32)
      continue;
    AdamSegment fp16 = good;
    fp16.type = ScalarType::kFloat16;
    refuses(fp16);
  }
  SplitParameter parameter(1000, StateFormat::kSplitInt8);
  refuses(parameter.segment(coefficients, 1, 1, 1000));
}

}  // namespace
}  // namespace castor
