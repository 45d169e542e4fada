#include "optim/bandwidth.h"

#include <gtest/gtest.h>

#include <algorithm>
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

}  // namespace
}  // namespace castor
