#include "optim/bandwidth.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <vector>

#include "core/error.h"
#include "optim/test_support.h"

namespace castor {
namespace {

TEST(InPlaceBandwidthTest, AddsOneToEveryElementInEachPass) {
  testing::BackwardsExecutor executor(2);
  std::vector<float> array(1'000'003, 0.0f);
  EXPECT_GT(in_place_bandwidth(executor, array, 3), 0.0);
  EXPECT_EQ(std::ranges::count(array, 4.0f), 1'000'003);  // one pass more, to warm up
}

TEST(InPlaceBandwidthTest, RejectsNothingToMeasure) {
  testing::InlineExecutor executor;
  std::vector<float> array(8);
  EXPECT_THROW((void)in_place_bandwidth(executor, {}, 1), InvalidArgument);
  EXPECT_THROW((void)in_place_bandwidth(executor, array, 0), InvalidArgument);
}

TEST(AdamBandwidthTest, StepsEveryElementInEachPass) {
  testing::BackwardsExecutor executor(2);
  std::vector<float> arrays(4 * 100'003);
  EXPECT_GT(adam_bandwidth(executor, arrays, 3), 0.0);
  const std::span<const float> weights(arrays.data(), 100'003);
  EXPECT_LT(weights[0], 1.0f - 1e-3f);  // four steps against a gradient of 1
  EXPECT_EQ(std::ranges::count(weights, weights[0]), 100'003);
}

TEST(AdamBandwidthTest, RejectsNothingToMeasure) {
  testing::InlineExecutor executor;
  std::vector<float> arrays(8);
  EXPECT_THROW((void)adam_bandwidth(executor, std::span(arrays).first(3), 1), InvalidArgument);
  EXPECT_THROW((void)adam_bandwidth(executor, arrays, 0), InvalidArgument);
}

}  // namespace
}  // namespace castor
