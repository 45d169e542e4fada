#include "cuda/adam_body.h"

#include <gtest/gtest.h>

#include <bit>
#include <string>
#include <vector>

#include "cuda/adam_state.h"
#include "cuda/host_kernels.h"

namespace castor {
namespace {

using testing::AdamKind;
using testing::AdamState;
using testing::options_with;
using testing::update_on_cpu;

void update_by_kernels(AdamState& state, const AdamCoefficients& coefficients, std::int64_t step) {
  const AdamSegment segment = state.segment(coefficients, step);
  testing::adam_kernels_on_host({&segment, 1});
}

class AdamBodyTest : public ::testing::TestWithParam<AdamKind> {};

TEST_P(AdamBodyTest, GivesTheCpuLoopsBitsAtEveryLength) {
  for (const WeightDecayMode mode : {WeightDecayMode::kDecoupled, WeightDecayMode::kL2}) {
    for (const std::size_t numel :
         {0u, 1u, 31u, 255u, 256u, 257u, 1023u, 1024u, 1025u, 4099u, 70'001u}) {
      AdamState state(numel, GetParam().type, GetParam().format, numel % 2, 7);
      AdamState expected = state;
      for (std::int64_t step = 1; step <= 4; ++step) {
        const AdamCoefficients coefficients(options_with(mode), step, 0.37);
        state.set_grads(static_cast<unsigned>(step));
        expected.set_grads(static_cast<unsigned>(step));
        update_by_kernels(state, coefficients, step);
        update_on_cpu(expected, coefficients, step);
        ASSERT_EQ(state.difference(expected), "") << numel << " elements, step " << step;
      }
    }
  }
}

TEST_P(AdamBodyTest, GivesTheCpuLoopsBitsForSpecialValues) {
  for (const WeightDecayMode mode : {WeightDecayMode::kDecoupled, WeightDecayMode::kL2}) {
    for (const double eps : {0.0, 1e-8}) {
      AdamOptions options = options_with(mode);
      options.eps = eps;
      AdamState state = testing::special_state(GetParam());
      AdamState expected = state;
      for (std::int64_t step = 1; step <= 2; ++step) {
        const AdamCoefficients coefficients(options, step, 1.0);
        update_by_kernels(state, coefficients, step);
        update_on_cpu(expected, coefficients, step);
        ASSERT_EQ(state.difference(expected), "") << "step " << step << ", eps " << eps;
      }
    }
  }
}

TEST_P(AdamBodyTest, TakesAParameterThatUserCodeWrote) {
  AdamState state(1000, GetParam().type, GetParam().format, 0, 3);
  for (std::size_t i = 0; i < state.numel(); i += 3) {
    if (GetParam().type == ScalarType::kFloat32) {
      state.set_weight(i, 1.0f + static_cast<float>(i));  // which is its own master
    } else {
      state.set_param_bits(i, static_cast<std::uint16_t>(0x3c00u + i));
    }
  }
  AdamState expected = state;
  const AdamCoefficients coefficients(options_with(WeightDecayMode::kDecoupled), 1, 1.0);
  update_by_kernels(state, coefficients, 1);
  update_on_cpu(expected, coefficients, 1);
  EXPECT_EQ(state.difference(expected), "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, AdamBodyTest, ::testing::ValuesIn(testing::kAdamKinds),
                         testing::kind_name);

// A GPU's arithmetic gives the NaN 0x7fffffff; here it stands in a moment, and the CPU passes its
// bits on.
TEST(AdamBodyTest, TheNanOfAGpuDoesNotBecomeAZero) {
  AdamState state(4, ScalarType::kBFloat16, StateFormat::kSplit, 0, 1);
  for (std::size_t i = 0; i < state.numel(); ++i)
    state.set_moments(i, std::bit_cast<float>(0x7fffffffu), 1.0f);
  update_by_kernels(state, AdamCoefficients({}, 1, 1.0), 1);
  for (std::size_t i = 0; i < state.numel(); ++i) {
    EXPECT_EQ(state.param_bits(i), 0x7fc0u);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(state.exp_avg(i)), 0x7fc00000u);
  }
}

}  // namespace
}  // namespace castor
