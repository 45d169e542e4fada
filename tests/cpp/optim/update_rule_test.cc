#include "optim/update_rule.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "optim/adam.h"
#include "optim/test_support.h"

namespace castor {
namespace {

using testing::InlineExecutor;

constexpr RuleOptions kOptions = {1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0};

TEST(UpdateRuleTest, UnknownRuleIsRefusedWithThoseThereAre) {
  try {
    static_cast<void>(make_update_rule("sophia", StateFormat::kFp32));
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "there is no update rule 'sophia'; there are adam, lion, sgd, sgd_momentum");
  }
}

TEST(UpdateRuleTest, AdamDeclaresItsStates) {
  const auto bytes = [](StateFormat format) {
    const auto rule = make_update_rule("adam", format);
    std::vector<std::size_t> found;
    for (const StateSpec& spec : rule->states()) {
      found.push_back(spec.bytes(kMomentBlock + 1));
    }
    return found;
  };
  EXPECT_EQ(bytes(StateFormat::kFp32), (std::vector<std::size_t>{1028, 1028}));
  EXPECT_EQ(bytes(StateFormat::kSplit), (std::vector<std::size_t>{1028, 1028}));
  EXPECT_EQ(bytes(StateFormat::kSplitBf16), (std::vector<std::size_t>{514, 514}));
  EXPECT_EQ(bytes(StateFormat::kSplitInt8), (std::vector<std::size_t>{257, 257, 16}));
  EXPECT_EQ(make_update_rule("adam", StateFormat::kSplitInt8)->granule(), kMomentBlock);
  EXPECT_EQ(make_update_rule("adam", StateFormat::kSplit)->granule(), 1u);
}

TEST(UpdateRuleTest, AdamUpdatesAsAdamUpdateDoes) {
  constexpr std::size_t kNumel = 100;
  const auto rule = make_update_rule("adam", StateFormat::kFp32);
  InlineExecutor executor;
  std::vector<float> grad(kNumel, 0.25f);
  std::vector<float> param[2], exp_avg[2], exp_avg_sq[2];
  for (int i = 0; i < 2; ++i) {
    param[i].assign(kNumel, 1.0f);
    exp_avg[i].assign(kNumel, 0.1f);
    exp_avg_sq[i].assign(kNumel, 0.2f);
  }
  const UpdateSegment segment{.param = param[0].data(),
                              .grad = grad.data(),
                              .states = {exp_avg[0].data(), exp_avg_sq[0].data()},
                              .numel = kNumel,
                              .coefficients = rule->coefficients(kOptions, 3, 0.5)};
  rule->update(executor, {&segment, 1});
  const AdamSegment expected{
      .master = param[1].data(),
      .exp_avg = exp_avg[1].data(),
      .exp_avg_sq = exp_avg_sq[1].data(),
      .grad = grad.data(),
      .numel = kNumel,
      .coefficients = AdamCoefficients({.lr = 1e-2, .weight_decay = 0.1}, 3, 0.5)};
  adam_update(executor, {&expected, 1});
  EXPECT_EQ(param[0], param[1]);
  EXPECT_EQ(exp_avg[0], exp_avg[1]);
  EXPECT_EQ(exp_avg_sq[0], exp_avg_sq[1]);
  EXPECT_NE(param[0][0], 1.0f);
}

TEST(UpdateRuleTest, OptionsOutOfRangeAreRefusedBeforeAnythingChanges) {
  const auto rule = make_update_rule("adam", StateFormat::kFp32);
  RuleOptions bad = kOptions;
  bad[1] = 2.0;  // beta1
  EXPECT_THROW(static_cast<void>(rule->coefficients(bad, 1, 1.0)), InvalidArgument);
}

}  // namespace
}  // namespace castor
