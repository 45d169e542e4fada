// SGD and Lion: their formulas, in every type and format, with the bits of every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "optim/lion_rule.h"
#include "optim/rounding.h"
#include "optim/sgd_rule.h"
#include "optim/split_master.h"
#include "optim/test_support.h"

namespace castor {
namespace {

using testing::BackwardsExecutor;
using testing::bits_of;
using testing::InlineExecutor;
using testing::kNaN;

constexpr std::size_t kNumel = 3 * 64 * 1024 + 77;
constexpr ScalarType kTypes[] = {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16};

std::vector<float> normal(std::uint32_t seed, std::size_t numel = kNumel) {
  std::mt19937 random(seed);
  std::normal_distribution<float> values;
  std::vector<float> result(numel);
  for (float& value : result)
    value = values(random);
  return result;
}

/// A parameter of one type in one format, with its gradient and state.
struct Held {
  ScalarType type;
  bool split;
  std::vector<float> master, state, grad;
  std::vector<std::uint16_t> param16, grad16;
  std::vector<std::int16_t> remainder;

  Held(ScalarType type_, bool split_, std::size_t numel = kNumel)
      : type(type_),
        split(split_),
        master(normal(1, numel)),
        state(normal(2, numel)),
        grad(normal(3, numel)) {
    if (type == ScalarType::kFloat32)
      return;
    for (std::size_t i = 0; i < numel; ++i) {
      const bool half = type == ScalarType::kFloat16;
      param16.push_back(half ? round_to_float16(master[i]) : round_to_bfloat16(master[i]));
      grad16.push_back(half ? round_to_float16(grad[i]) : round_to_bfloat16(grad[i]));
      grad[i] = half ? from_float16(grad16[i]) : from_bfloat16(grad16[i]);
      remainder.push_back(detail::remainder_of(master[i]));
    }
  }

  [[nodiscard]] UpdateSegment segment(const RuleCoefficients& coefficients, bool has_state) {
    const bool own = type == ScalarType::kFloat32;
    UpdateSegment segment{.param = own ? static_cast<void*>(master.data()) : param16.data(),
                          .grad = own ? static_cast<const void*>(grad.data()) : grad16.data(),
                          .master = own || split ? nullptr : master.data(),
                          .remainder = split ? remainder.data() : nullptr,
                          .type = type,
                          .numel = grad.size(),
                          .coefficients = coefficients};
    if (has_state)
      segment.states[0] = state.data();
    return segment;
  }

  /// fp32 weights, as the next update will see them.
  [[nodiscard]] std::vector<float> weights() const {
    if (!split)
      return master;
    std::vector<float> joined;
    for (std::size_t i = 0; i < param16.size(); ++i)
      joined.push_back(detail::join_master(param16[i], remainder[i]));
    return joined;
  }
};

void expect_same(const std::vector<float>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    ASSERT_EQ(bits_of(actual[i]), bits_of(expected[i])) << i;
}

struct SgdGroup {
  float lr, momentum, dampening, weight_decay;
  bool nesterov, maximize;

  [[nodiscard]] RuleOptions options() const {
    return {lr, momentum, dampening, weight_decay, nesterov ? 1.0 : 0.0, maximize ? 1.0 : 0.0};
  }
};

/// torch.optim.SGD, one operator after the other.
void sgd_reference(const SgdGroup& group, bool first, float grad_scale, const Held& held,
                   std::vector<float>& weights, std::vector<float>& buffers) {
  const auto options = group.options();
  const auto keep = static_cast<float>(1.0 - options[2]);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    float g = held.grad[i] * grad_scale;
    if (group.maximize)
      g = -g;
    if (group.weight_decay != 0.0f)
      g = std::fma(weights[i], group.weight_decay, g);
    if (group.momentum != 0.0f) {
      const float decayed = buffers[i] * group.momentum;
      buffers[i] = first ? g : std::fma(g, keep, decayed);
      g = group.nesterov ? std::fma(buffers[i], group.momentum, g) : buffers[i];
    }
    weights[i] = std::fma(g, -group.lr, weights[i]);
  }
}

const SgdGroup kGroups[] = {{0.1f, 0.0f, 0.0f, 0.0f, false, false},
                            {0.1f, 0.0f, 0.0f, 0.01f, false, true},
                            {0.1f, 0.9f, 0.0f, 0.0f, false, false},
                            {0.1f, 0.7f, 0.25f, 0.01f, false, false},
                            {0.1f, 0.9f, 0.0f, 0.01f, true, true}};

template <Momentum momentum>
void expect_sgd_of_the_reference() {
  InlineExecutor executor;
  for (const Isa isa : supported_isas()) {
    for (const SgdGroup& group : kGroups) {
      if (momentum == Momentum::kNone && group.momentum != 0.0f)
        continue;
      for (const ScalarType type : kTypes) {
        for (const bool split : {false, true}) {
          if (split && type != ScalarType::kBFloat16)
            continue;
          const SgdRule<momentum> rule(split ? StateFormat::kSplit : StateFormat::kFp32);
          for (const std::int64_t step : {1, 2}) {
            Held held(type, split, 1000);
            std::vector<float> weights = held.weights();
            std::vector<float> buffers = held.state;
            sgd_reference(group, step == 1, 0.5f, held, weights, buffers);
            const auto segment = held.segment(rule.coefficients(group.options(), step, 0.5),
                                              momentum == Momentum::kBuffer);
            rule.update_on(executor, {&segment, 1}, isa);
            expect_same(held.weights(), weights);
            expect_same(held.state, buffers);
          }
        }
      }
    }
  }
}

TEST(ElementRulesTest, SgdTakesTorchsStepsOnEveryInstructionSet) {
  expect_sgd_of_the_reference<Momentum::kNone>();
  expect_sgd_of_the_reference<Momentum::kBuffer>();
}

TEST(ElementRulesTest, LionTakesTheAuthorsStepOnEveryInstructionSet) {
  constexpr float kLr = 0.01f, kBeta1 = 0.9f, kBeta2 = 0.99f, kDecay = 0.25f;
  InlineExecutor executor;
  for (const Isa isa : supported_isas()) {
    for (const bool split : {false, true}) {
      Held held(split ? ScalarType::kBFloat16 : ScalarType::kFloat32, split, 1000);
      held.state[7] = 0.0f;  // and a gradient of zero: no step
      held.grad[7] = 0.0f;
      if (split)
        held.grad16[7] = 0;
      const LionRule rule(split ? StateFormat::kSplit : StateFormat::kFp32);
      std::vector<float> weights = held.weights();
      std::vector<float> averages = held.state;
      const auto keep1 = static_cast<float>(1.0 - double{kBeta1});
      const auto keep2 = static_cast<float>(1.0 - double{kBeta2});
      const auto decay = static_cast<float>(1.0 - double{kLr} * double{kDecay});
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const float decayed = averages[i] * kBeta1;
        const float u = std::fma(held.grad[i], keep1, decayed);
        const float sign = u > 0.0f ? 1.0f : u < 0.0f ? -1.0f : 0.0f;
        weights[i] = std::fma(sign, -kLr, weights[i] * decay);
        const float average = averages[i] * kBeta2;
        averages[i] = std::fma(held.grad[i], keep2, average);
      }
      const auto segment =
          held.segment(rule.coefficients({kLr, kBeta1, kBeta2, kDecay}, 1, 1.0), true);
      rule.update_on(executor, {&segment, 1}, isa);
      expect_same(held.weights(), weights);
      expect_same(held.state, averages);
    }
  }
}

TEST(ElementRulesTest, BitsDependOnNeitherTasksNorCuts) {
  const SgdRule<Momentum::kBuffer> rule(StateFormat::kFp32);
  const RuleCoefficients coefficients = rule.coefficients(kGroups[3].options(), 2, 1.0);
  Held whole(ScalarType::kBFloat16, false);
  Held cut(ScalarType::kBFloat16, false);
  InlineExecutor executor;
  const auto segment = whole.segment(coefficients, true);
  rule.update(executor, {&segment, 1});
  EXPECT_GT(executor.num_tasks(), 1u);
  std::vector<UpdateSegment> pieces;
  for (std::size_t begin = 0; begin < kNumel;) {
    const std::size_t count = std::min<std::size_t>(kNumel - begin, 50001);
    UpdateSegment piece = cut.segment(coefficients, true);
    piece.param = cut.param16.data() + begin;
    piece.grad = cut.grad16.data() + begin;
    piece.master = cut.master.data() + begin;
    piece.states[0] = cut.state.data() + begin;
    piece.numel = count;
    piece.first_element = begin;
    pieces.push_back(piece);
    begin += count;
  }
  BackwardsExecutor others(3);
  rule.update(others, pieces);
  EXPECT_EQ(whole.param16, cut.param16);
  expect_same(cut.master, whole.master);
  expect_same(cut.state, whole.state);
}

TEST(ElementRulesTest, AWrittenParameterBecomesItsMaster) {
  const SgdRule<Momentum::kNone> rule(StateFormat::kFp32);
  Held held(ScalarType::kBFloat16, false, 100);
  held.param16[3] = round_to_bfloat16(5.0f);
  InlineExecutor executor;
  const auto segment = held.segment(rule.coefficients(kGroups[0].options(), 1, 1.0), false);
  rule.update(executor, {&segment, 1});
  EXPECT_EQ(held.master[3], std::fma(held.grad[3], -0.1f, 5.0f));
}

TEST(ElementRulesTest, AGroupWithoutMomentumLeavesItsBufferAndItsStepUncounted) {
  const SgdRule<Momentum::kBuffer> rule(StateFormat::kFp32);
  Held held(ScalarType::kFloat32, false, 100);
  const std::vector<float> before = held.state;
  InlineExecutor executor;
  const auto segment = held.segment(rule.coefficients(kGroups[0].options(), 1, 1.0), true);
  rule.update(executor, {&segment, 1});
  expect_same(held.state, before);
  EXPECT_FALSE(rule.steps_states(kGroups[0].options()));
  EXPECT_TRUE(rule.steps_states(kGroups[2].options()));
}

TEST(ElementRulesTest, WithoutMomentumThereIsNoState) {
  EXPECT_TRUE(make_update_rule("sgd", StateFormat::kSplit)->states().empty());
  const auto states = make_update_rule("sgd_momentum", StateFormat::kSplit)->states();
  ASSERT_EQ(states.size(), 1u);
  EXPECT_EQ(states[0].name, "momentum_buffer");
  EXPECT_EQ(states[0].bytes(10), 40u);
}

TEST(ElementRulesTest, FormatsThatRoundAreRefusedByName) {
  for (const char* name : {"sgd", "sgd_momentum", "lion"}) {
    try {
      static_cast<void>(make_update_rule(name, StateFormat::kSplitBf16));
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()), "the update rule '" + std::string(name) +
                                               "' has no state format split_bf16; there are fp32, "
                                               "split");
    }
  }
}

TEST(ElementRulesTest, OptionsOutOfRangeAreRefusedWithTheirGroup) {
  const SgdRule<Momentum::kNone> plain(StateFormat::kFp32);
  const SgdRule<Momentum::kBuffer> momentum(StateFormat::kFp32);
  const LionRule lion(StateFormat::kFp32);
  const auto refused = [](const UpdateRule& rule, const RuleOptions& good, const RuleOptions& bad) {
    try {
      const RuleOptions groups[] = {good, bad};
      check_options(rule, groups);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const RuleOptions good = kGroups[0].options();
  EXPECT_EQ(refused(plain, good, good), "");
  EXPECT_EQ(refused(plain, good, {-1.0}).rfind("param_groups[1]: SGD: lr must be", 0), 0u);
  EXPECT_NE(refused(plain, good, kGroups[2].options()).find("momentum is 0.9"), std::string::npos);
  EXPECT_EQ(refused(momentum, good, kGroups[2].options()), "");
  EXPECT_NE(refused(momentum, good, {0.1, 0.9, 0.5, 0.0, 1.0}).find("nesterov"), std::string::npos);
  EXPECT_NE(refused(momentum, good, {0.1, kNaN}).find("momentum must be"), std::string::npos);
  EXPECT_NE(refused(lion, {0.1, 0.9, 0.9, 0.0}, {0.1, 1.0, 0.9, 0.0}).find("Lion: beta1"),
            std::string::npos);
  EXPECT_THROW(static_cast<void>(lion.coefficients({0.1, 0.9, 0.9, 0.0}, 0, 1.0)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(plain.coefficients(good, 1, kNaN)), InvalidArgument);
}

TEST(ElementRulesTest, ASegmentThatLacksAnArrayIsRefusedBeforeAnythingIsWritten) {
  const SgdRule<Momentum::kBuffer> rule(StateFormat::kFp32);
  const RuleCoefficients coefficients = rule.coefficients(kGroups[2].options(), 1, 1.0);
  Held held(ScalarType::kBFloat16, false, 100);
  Held lacking(ScalarType::kBFloat16, false, 100);
  const std::vector<float> before = held.master;
  UpdateSegment segments[] = {held.segment(coefficients, true),
                              lacking.segment(coefficients, true)};
  InlineExecutor executor;
  const auto expect_refused = [&] {
    EXPECT_THROW(rule.update(executor, segments), InvalidArgument);
    expect_same(held.master, before);
  };
  segments[1].states[0] = nullptr;
  expect_refused();
  segments[1] = lacking.segment(coefficients, true);
  segments[1].master = nullptr;
  expect_refused();
  segments[1] = lacking.segment(coefficients, true);
  segments[1].remainder = lacking.remainder.data();
  expect_refused();
  segments[1] = lacking.segment(coefficients, true);
  segments[1].grad = nullptr;
  expect_refused();
}

}  // namespace
}  // namespace castor
