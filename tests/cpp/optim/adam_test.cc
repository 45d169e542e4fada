#include "optim/adam.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "optim/adam_reference.h"
#include "optim/dispatch.h"
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
using testing::ReferenceElement;

/// One parameter's arrays. Each starts at another offset from a cache line when skew is not 0.
struct Parameter {
  Parameter(std::size_t numel, ScalarType scalar_type, std::size_t skew = 0, unsigned seed = 7)
      : type(scalar_type),
        master(numel, skew),
        exp_avg(numel, 2 * skew),
        exp_avg_sq(numel, 3 * skew),
        grad32(numel, 5 * skew),
        grad16(numel, 7 * skew),
        param(numel, 9 * skew) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel; ++i) {
      master[i] = normal(random);
      exp_avg[i] = 0.1f * normal(random);
      exp_avg_sq[i] = std::fabs(0.01f * normal(random));
      set_grad(i, normal(random));
      param[i] = is_fp32() ? std::uint16_t{0} : reference_round(master[i], type);
    }
  }

  [[nodiscard]] bool is_fp32() const { return type == ScalarType::kFloat32; }

  void set_grad(std::size_t i, float value) {
    grad32[i] = value;
    if (!is_fp32()) {
      grad16[i] = reference_round(value, type);
      grad32[i] = reference_load(grad16[i], type);
    }
  }

  [[nodiscard]] AdamSegment segment(const AdamCoefficients& coefficients, std::size_t begin,
                                    std::size_t end) {
    return {.master = master.data() + begin,
            .exp_avg = exp_avg.data() + begin,
            .exp_avg_sq = exp_avg_sq.data() + begin,
            .grad = is_fp32() ? static_cast<const void*>(grad32.data() + begin)
                              : static_cast<const void*>(grad16.data() + begin),
            .param = is_fp32() ? nullptr : param.data() + begin,
            .type = type,
            .numel = end - begin,
            .coefficients = coefficients};
  }

  void update(Executor& executor, const AdamCoefficients& coefficients, Isa isa) {
    const AdamSegment all = segment(coefficients, 0, master.size());
    detail::adam_update(executor, {&all, 1}, isa);
  }

  void update_with_reference(const AdamOptions& options, std::int64_t step, double grad_scale) {
    const detail::ScopedFlushToZero flush;
    for (std::size_t i = 0; i < master.size(); ++i) {
      float weight = master[i];
      if (!is_fp32() && param[i] != reference_round(weight, type)) {
        weight = reference_load(param[i], type);
      }
      const ReferenceElement updated = testing::reference_adam(
          {weight, exp_avg[i], exp_avg_sq[i]}, grad32[i], options, step, grad_scale);
      master[i] = updated.weight;
      exp_avg[i] = updated.exp_avg;
      exp_avg_sq[i] = updated.exp_avg_sq;
      if (!is_fp32())
        param[i] = reference_round(updated.weight, type);
    }
  }

  [[nodiscard]] bool same_bits(const Parameter& other) const {
    return master.same_bits(other.master) && exp_avg.same_bits(other.exp_avg) &&
           exp_avg_sq.same_bits(other.exp_avg_sq) && grad32.same_bits(other.grad32) &&
           grad16.same_bits(other.grad16) && param.same_bits(other.param);
  }

  [[nodiscard]] bool guards_intact() const {
    return master.guards_intact() && exp_avg.guards_intact() && exp_avg_sq.guards_intact() &&
           param.guards_intact();
  }

  ScalarType type;
  Array<float> master, exp_avg, exp_avg_sq, grad32;
  Array<std::uint16_t> grad16, param;
};

AdamOptions options_with(WeightDecayMode mode) {
  return {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .mode = mode};
}

class AdamTest : public ::testing::TestWithParam<std::tuple<Isa, ScalarType>> {
 protected:
  [[nodiscard]] static Isa isa() { return std::get<0>(GetParam()); }
  [[nodiscard]] static ScalarType type() { return std::get<1>(GetParam()); }
};

TEST_P(AdamTest, GivesTheReferencesBitsAtEveryLengthAndAlignment) {
  InlineExecutor executor;
  for (const WeightDecayMode mode : {WeightDecayMode::kDecoupled, WeightDecayMode::kL2}) {
    const AdamOptions options = options_with(mode);
    for (std::size_t numel = 0; numel <= 131; ++numel) {
      for (const std::size_t skew : {0u, 1u}) {
        Parameter parameter(numel, type(), skew, static_cast<unsigned>(numel));
        Parameter expected = parameter;
        for (std::int64_t step = 1; step <= 3; ++step) {
          parameter.update(executor, AdamCoefficients(options, step, 0.37), isa());
          expected.update_with_reference(options, step, 0.37);
          ASSERT_TRUE(parameter.same_bits(expected)) << numel << " elements, skew " << skew;
        }
        ASSERT_TRUE(parameter.guards_intact());
      }
    }
  }
}

TEST_P(AdamTest, GivesTheReferencesBitsOnAMillionAndSevenElements) {
  BackwardsExecutor executor(3);
  Parameter parameter(1'000'007, type(), 1);
  Parameter expected = parameter;
  const AdamOptions options = options_with(WeightDecayMode::kDecoupled);
  for (std::int64_t step = 1; step <= 3; ++step) {
    parameter.update(executor, AdamCoefficients(options, step, 1.0), isa());
    expected.update_with_reference(options, step, 1.0);
    ASSERT_TRUE(parameter.same_bits(expected)) << step;
  }
  EXPECT_TRUE(parameter.guards_intact());
}

TEST_P(AdamTest, GivesTheReferencesBitsForUnusualHyperParameters) {
  InlineExecutor executor;
  for (const AdamOptions& options :
       {AdamOptions{.beta1 = 0.0, .beta2 = 0.0}, AdamOptions{.beta1 = 0.5},
        AdamOptions{.beta1 = 0.3}, AdamOptions{.lr = 0.0}, AdamOptions{.eps = 0.0},
        AdamOptions{.weight_decay = 0.0, .mode = WeightDecayMode::kL2}}) {
    Parameter parameter(1003, type());
    Parameter expected = parameter;
    parameter.update(executor, AdamCoefficients(options, 1000, 65536.0), isa());
    expected.update_with_reference(options, 1000, 65536.0);
    EXPECT_TRUE(parameter.same_bits(expected)) << options.beta1 << " " << options.lr;
  }
}

TEST_P(AdamTest, BitsDoNotDependOnHowSegmentsAreCut) {
  constexpr std::size_t kNumel = 300'011;
  const AdamCoefficients coefficients(options_with(WeightDecayMode::kDecoupled), 5, 0.5);
  Parameter whole(kNumel, type());
  Parameter cut = whole;
  InlineExecutor inline_executor;
  whole.update(inline_executor, coefficients, isa());

  std::mt19937 random(11);
  for (const std::size_t longest : {7u, 1000u, 200'000u}) {
    Parameter parameter = cut;
    std::vector<AdamSegment> segments;
    for (std::size_t begin = 0; begin < kNumel;) {
      const std::size_t end = std::min(kNumel, begin + random() % longest);  // some are empty
      segments.push_back(parameter.segment(coefficients, begin, end));
      begin = end;
    }
    std::ranges::shuffle(segments, random);
    BackwardsExecutor executor(4);
    detail::adam_update(executor, segments, isa());
    EXPECT_TRUE(parameter.same_bits(whole)) << "pieces of up to " << longest;
    EXPECT_TRUE(parameter.guards_intact());
  }
}

TEST_P(AdamTest, BitsDoNotDependOnTheNumberOfThreads) {
  const AdamCoefficients coefficients(options_with(WeightDecayMode::kL2), 2, 1.0);
  Parameter one(500'009, type());
  Parameter many = one;
  BackwardsExecutor one_thread(1);
  BackwardsExecutor many_threads(7);
  one.update(one_thread, coefficients, isa());
  many.update(many_threads, coefficients, isa());
  EXPECT_TRUE(one.same_bits(many));
}

/// Norm-relative error of the weights against double precision after 100 steps.
double error_after_100_steps(const AdamOptions& options, ScalarType type, Isa isa) {
  constexpr std::size_t kNumel = 4099;
  InlineExecutor executor;
  Parameter parameter(kNumel, type);
  std::vector<testing::DoubleAdam> exact(kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) {
    exact[i].weight = parameter.master[i];
    parameter.exp_avg[i] = 0;
    parameter.exp_avg_sq[i] = 0;
  }
  std::mt19937 random(13);
  std::normal_distribution<float> normal;
  for (std::int64_t step = 1; step <= 100; ++step) {
    for (std::size_t i = 0; i < kNumel; ++i) {
      parameter.set_grad(i, normal(random));
      exact[i].step(parameter.grad32[i], options, step);
    }
    parameter.update(executor, AdamCoefficients(options, step, 1.0), isa);
  }
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < kNumel; ++i) {
    error += std::pow(parameter.master[i] - exact[i].weight, 2);
    size += std::pow(exact[i].weight, 2);
    EXPECT_NEAR(parameter.exp_avg[i], exact[i].exp_avg, 1e-6);
    EXPECT_NEAR(parameter.exp_avg_sq[i], exact[i].exp_avg_sq, 3e-6 * exact[i].exp_avg_sq);
  }
  return std::sqrt(error / size);
}

TEST_P(AdamTest, StaysWithinAMillionthOfDoublePrecisionOver100Steps) {
  const AdamOptions plain{.lr = 1e-3};
  const AdamOptions l2{.lr = 1e-3, .weight_decay = 0.01, .mode = WeightDecayMode::kL2};
  EXPECT_LT(error_after_100_steps(plain, type(), isa()), 1e-6);
  EXPECT_LT(error_after_100_steps(l2, type(), isa()), 1e-6);
}

// w *= 1 - lr * weight_decay shortens w by a nearly constant number of fp32 steps, so its rounding
// errors do not average out. In torch they are the same.
TEST_P(AdamTest, DecoupledDecayStaysWithinItsRoundingOfDoublePrecision) {
  const AdamOptions options{.lr = 1e-3, .weight_decay = 0.01};
  EXPECT_LT(error_after_100_steps(options, type(), isa()), 5e-6);
}

TEST_P(AdamTest, SubnormalsCountAsZeroAndTheCallersModeIsKept) {
  InlineExecutor executor;
  const float subnormal = std::bit_cast<float>(0x000fffffu);
  Parameter parameter(67, type());
  for (std::size_t i = 0; i < 67; ++i) {
    if (i % 2 == 0)
      parameter.exp_avg_sq[i] = subnormal;
    if (i % 3 == 0)
      parameter.exp_avg[i] = -subnormal;
    if (i % 5 == 0)
      parameter.set_grad(i, subnormal);
    if (i % 7 == 0) {
      parameter.master[i] = subnormal;
      parameter.param[i] =
          parameter.is_fp32() ? std::uint16_t{0} : reference_round(subnormal, type());
    }
    if (i % 11 == 0)
      parameter.set_grad(i, 1e-22f);  // its square underflows
  }
  Parameter expected = parameter;
  const AdamOptions options = options_with(WeightDecayMode::kDecoupled);
  parameter.update(executor, AdamCoefficients(options, 1, 1.0), isa());
  expected.update_with_reference(options, 1, 1.0);
  EXPECT_TRUE(parameter.same_bits(expected));
#if defined(__x86_64__)
  for (std::size_t i = 0; i < 67; ++i) {
    EXPECT_NE(std::fpclassify(parameter.exp_avg_sq[i]), FP_SUBNORMAL);
    EXPECT_NE(std::fpclassify(parameter.master[i]), FP_SUBNORMAL);
  }
#endif
  volatile float smallest_normal = std::numeric_limits<float>::min();
  EXPECT_GT(smallest_normal * 0.5f, 0.0f) << "the caller's thread now flushes subnormals";
}

TEST_P(AdamTest, NonFiniteGradientsSpoilTheirOwnElementOnly) {
  InlineExecutor executor;
  const AdamOptions options = options_with(WeightDecayMode::kDecoupled);
  for (const float bad : {kNaN, kInfinity, -kInfinity}) {
    for (std::size_t position = 0; position < 40; ++position) {
      Parameter parameter(40, type());
      parameter.set_grad(position, bad);
      Parameter expected = parameter;
      parameter.update(executor, AdamCoefficients(options, 1, 1.0), isa());
      expected.update_with_reference(options, 1, 1.0);
      for (std::size_t i = 0; i < 40; ++i) {
        if (i != position) {
          ASSERT_EQ(bits_of(parameter.master[i]), bits_of(expected.master[i]));
          ASSERT_EQ(parameter.param[i], expected.param[i]);
        }
      }
      EXPECT_TRUE(std::isnan(parameter.master[position]));
      if (type() != ScalarType::kFloat32) {
        EXPECT_TRUE(std::isnan(reference_load(parameter.param[position], type())));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    EverySupportedIsa, AdamTest,
    ::testing::Combine(::testing::ValuesIn(supported_isas().begin(), supported_isas().end()),
                       ::testing::Values(ScalarType::kFloat32, ScalarType::kBFloat16,
                                         ScalarType::kFloat16)),
    [](const auto& test) {
      return std::string(to_string(std::get<0>(test.param))) + "_" +
             std::string(to_string(std::get<1>(test.param)));
    });

class MixedPrecisionAdamTest : public AdamTest {};

TEST_P(MixedPrecisionAdamTest, AnEditedParameterReplacesItsMaster) {
  InlineExecutor executor;
  const AdamOptions options{.lr = 0.0};
  Parameter parameter(101, type());
  const Parameter before = parameter;
  for (std::size_t i = 0; i < 101; i += 3)
    parameter.param[i] = reference_round(0.0f, type());
  parameter.param[1] = reference_round(-0.0f, type());
  parameter.param[100] = static_cast<std::uint16_t>(parameter.param[100] + 1);
  parameter.update(executor, AdamCoefficients(options, 1, 1.0), isa());
  for (std::size_t i = 0; i < 101; ++i) {
    const float expected = i % 3 == 0 ? 0.0f
                           : i == 1   ? -0.0f
                           : i == 100 ? reference_load(parameter.param[i], type())
                                      : before.master[i];
    ASSERT_EQ(parameter.master[i], expected) << i;
    ASSERT_EQ(parameter.param[i], reference_round(expected, type())) << i;
  }
}

TEST_P(MixedPrecisionAdamTest, AnUntouchedParameterNeverLosesItsMastersLowBits) {
  InlineExecutor executor;
  const AdamOptions options{.lr = 0.0};
  std::mt19937 random(17);
  Parameter parameter(50'000, type());
  for (std::size_t i = 0; i < parameter.master.size(); ++i) {
    float value = 0;
    do {
      value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    } while (!std::isnormal(value));
    if (i % 2 == 0) {  // an exact tie of bf16
      value = std::bit_cast<float>((bits_of(value) & 0xffff0000u) | 0x8000u);
    }
    parameter.master[i] = value;
    parameter.param[i] = reference_round(value, type());
    parameter.set_grad(i, 0.0f);
    parameter.exp_avg[i] = 0.0f;
  }
  const Parameter before = parameter;
  parameter.update(executor, AdamCoefficients(options, 1, 1.0), isa());
  EXPECT_TRUE(parameter.master.same_bits(before.master));
  EXPECT_TRUE(parameter.param.same_bits(before.param));
}

TEST_P(MixedPrecisionAdamTest, AWeightBeyondTheTypeBecomesInfiniteAndItsMasterStays) {
  InlineExecutor executor;
  Parameter parameter(33, type());
  const float large = type() == ScalarType::kFloat16 ? 70000.0f : 3.4e38f;
  for (std::size_t i = 0; i < 33; ++i)
    parameter.master[i] = i % 2 == 0 ? large : -large;
  for (std::size_t i = 0; i < 33; ++i) {
    parameter.param[i] = reference_round(parameter.master[i], type());
  }
  parameter.update(executor, AdamCoefficients({.lr = 0.0}, 1, 1.0), isa());
  for (std::size_t i = 0; i < 33; ++i) {
    EXPECT_EQ(parameter.master[i], i % 2 == 0 ? large : -large);
    EXPECT_EQ(reference_load(parameter.param[i], type()), i % 2 == 0 ? kInfinity : -kInfinity);
  }
}

INSTANTIATE_TEST_SUITE_P(
    EverySupportedIsa, MixedPrecisionAdamTest,
    ::testing::Combine(::testing::ValuesIn(supported_isas().begin(), supported_isas().end()),
                       ::testing::Values(ScalarType::kBFloat16, ScalarType::kFloat16)),
    [](const auto& test) {
      return std::string(to_string(std::get<0>(test.param))) + "_" +
             std::string(to_string(std::get<1>(test.param)));
    });

TEST(AdamTaskTest, AMillionElementsBecomeTasksOf64KibiElements) {
  InlineExecutor executor;
  Parameter parameter(1 << 20, ScalarType::kFloat32);
  parameter.update(executor, AdamCoefficients({}, 1, 1.0), best_isa());
  EXPECT_EQ(executor.num_tasks(), 16u);
}

TEST(AdamTaskTest, TensOfThousandsOfBiasesShareTasks) {
  constexpr std::size_t kSegments = 30'000;
  constexpr std::size_t kBias = 16;
  InlineExecutor executor;
  Parameter parameter(kSegments * kBias, ScalarType::kFloat32);
  const AdamCoefficients coefficients({}, 1, 1.0);
  std::vector<AdamSegment> segments;
  for (std::size_t i = 0; i < kSegments; ++i) {
    segments.push_back(parameter.segment(coefficients, i * kBias, (i + 1) * kBias));
  }
  adam_update(executor, segments);
  EXPECT_LE(executor.num_tasks(), 40u);
  EXPECT_GE(executor.num_tasks(), 7u);
}

TEST(AdamTaskTest, NothingToDoMakesNoTask) {
  InlineExecutor executor;
  adam_update(executor, {});
  const AdamSegment empty{.coefficients = AdamCoefficients({}, 1, 1.0)};
  adam_update(executor, {&empty, 1});
  EXPECT_EQ(executor.num_tasks(), 0u);
}

TEST(AdamTaskTest, EachSegmentHasItsOwnCoefficientsAndType) {
  InlineExecutor executor;
  Parameter a(100, ScalarType::kFloat32);
  Parameter b(100, ScalarType::kBFloat16);
  Parameter expected_a = a;
  Parameter expected_b = b;
  const AdamOptions options_a = options_with(WeightDecayMode::kDecoupled);
  const AdamOptions options_b{.lr = 0.5, .weight_decay = 0.3, .mode = WeightDecayMode::kL2};
  const std::vector<AdamSegment> segments = {
      a.segment(AdamCoefficients(options_a, 1, 1.0), 0, 100),
      b.segment(AdamCoefficients(options_b, 9, 2.0), 0, 100)};
  adam_update(executor, segments);
  expected_a.update_with_reference(options_a, 1, 1.0);
  expected_b.update_with_reference(options_b, 9, 2.0);
  EXPECT_TRUE(a.same_bits(expected_a));
  EXPECT_TRUE(b.same_bits(expected_b));
}

TEST(AdamContractTest, WrongPointersThrowBeforeAnythingIsWritten) {
  InlineExecutor executor;
  Parameter good(10, ScalarType::kFloat32);
  const Parameter before = good;
  Parameter half(10, ScalarType::kBFloat16);
  const AdamCoefficients coefficients({}, 1, 1.0);
  const auto expect_rejected = [&](AdamSegment bad) {
    const std::vector<AdamSegment> segments = {good.segment(coefficients, 0, 10), bad};
    EXPECT_THROW(adam_update(executor, segments), InvalidArgument);
  };
  AdamSegment segment = half.segment(coefficients, 0, 10);
  segment.param = nullptr;
  expect_rejected(segment);
  segment = good.segment(coefficients, 0, 10);
  segment.param = half.param.data();
  expect_rejected(segment);
  for (int missing = 0; missing < 4; ++missing) {
    segment = good.segment(coefficients, 0, 10);
    if (missing == 0)
      segment.master = nullptr;
    if (missing == 1)
      segment.exp_avg = nullptr;
    if (missing == 2)
      segment.exp_avg_sq = nullptr;
    if (missing == 3)
      segment.grad = nullptr;
    expect_rejected(segment);
  }
  EXPECT_TRUE(good.same_bits(before));
}

TEST(AdamContractTest, WrongHyperParametersThrow) {
  for (const AdamOptions& bad :
       {AdamOptions{.lr = -1.0}, AdamOptions{.lr = kNaN}, AdamOptions{.beta1 = 1.0},
        AdamOptions{.beta1 = -0.1}, AdamOptions{.beta2 = 1.0}, AdamOptions{.beta2 = kNaN},
        AdamOptions{.eps = -1e-8}, AdamOptions{.weight_decay = -0.1},
        AdamOptions{.weight_decay = kInfinity}}) {
    EXPECT_THROW(AdamCoefficients(bad, 1, 1.0), InvalidArgument);
  }
  EXPECT_THROW(AdamCoefficients({}, 0, 1.0), InvalidArgument);
  EXPECT_THROW(AdamCoefficients({}, 1, kInfinity), InvalidArgument);
  EXPECT_THROW(AdamCoefficients({}, 1, kNaN), InvalidArgument);
}

}  // namespace
}  // namespace castor
