#include "core/placement.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"

namespace castor {
namespace {

using enum Placement;
using testing::Net;

std::vector<Placement> fractions(double optim, double param, std::size_t chunks = 4) {
  return place_chunks(Net::row(chunks).layout(), {.policy = PlacementPolicy::kStatic,
                                                  .offload_optim_frac = optim,
                                                  .offload_param_frac = param});
}

TEST(PlacementTest, PoliciesPlaceEveryChunkAlike) {
  const ChunkLayout layout = Net::row(3).layout();
  const std::vector<Placement> stream(3, kStream);
  EXPECT_EQ(place_chunks(layout, {.policy = PlacementPolicy::kAuto}), stream);
  EXPECT_EQ(place_chunks(layout, {.policy = PlacementPolicy::kCpu}), stream);
  EXPECT_EQ(place_chunks(layout, {.policy = PlacementPolicy::kCuda}),
            std::vector<Placement>(3, kDevice));
}

TEST(PlacementTest, FractionsOffloadTheFirstChunks) {
  using P = std::vector<Placement>;
  EXPECT_EQ(fractions(0.0, 0.0), (P{kDevice, kDevice, kDevice, kDevice}));
  EXPECT_EQ(fractions(0.5, 0.0), (P{kKeep, kKeep, kDevice, kDevice}));
  EXPECT_EQ(fractions(0.51, 0.0), (P{kKeep, kKeep, kKeep, kDevice})) << "the first byte counts";
  EXPECT_EQ(fractions(1.0, 0.0), (P{kKeep, kKeep, kKeep, kKeep}));
  EXPECT_EQ(fractions(1.0, 0.25), (P{kStream, kKeep, kKeep, kKeep}));
  EXPECT_EQ(fractions(1.0, 1.0), (P{kStream, kStream, kStream, kStream}));
}

TEST(PlacementTest, FractionsAreOfBytesNotOfChunks) {
  Net net;
  net.add({3 * Net::kWhole});  // three quarters of the bytes, in a chunk of its own
  net.add({Net::kWhole});
  const PlacementOptions options{.policy = PlacementPolicy::kStatic, .offload_optim_frac = 0.75};
  EXPECT_EQ(place_chunks(net.layout(), options), (std::vector<Placement>{kKeep, kDevice}));
}

TEST(PlacementTest, RejectsFractionsThatMeanNothing) {
  for (const double wrong : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW((void)fractions(wrong, 0.0), InvalidArgument);
    EXPECT_THROW((void)fractions(1.0, wrong), InvalidArgument);
  }
}

TEST(PlacementTest, ParametersLeaveOnlyAfterTheirOptimizerState) {
  EXPECT_THROW((void)fractions(0.9, 0.1), InvalidArgument);
  EXPECT_NO_THROW((void)fractions(1.0, 0.1));
}

TEST(StoredStatesTest, NothingIsStoredThatFitsTheHost) {
  const std::vector<std::size_t> bytes = {10, 0, 20};
  EXPECT_EQ(choose_stored(bytes, 30), std::vector<bool>(3, false));
  EXPECT_EQ(choose_stored(bytes, 0), (std::vector<bool>{true, false, true}));
  EXPECT_TRUE(choose_stored({}, 0).empty());
}

TEST(StoredStatesTest, WhatStaysIsSpreadEvenly) {
  const std::vector<std::size_t> bytes(6, 10);
  EXPECT_EQ(choose_stored(bytes, 30), (std::vector<bool>{true, false, true, false, true, false}));
  EXPECT_EQ(choose_stored(bytes, 20), (std::vector<bool>{true, true, false, true, true, false}));
}

TEST(StoredStatesTest, WhatStaysNeverPassesTheBudget) {
  std::mt19937 random(1);
  for (int round = 0; round < 1'000; ++round) {
    std::vector<std::size_t> bytes(1 + random() % 40);
    for (std::size_t& chunk : bytes) {
      chunk = random() % 3 == 0 ? 0 : random() % 1'000'003;
    }
    const std::size_t total = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
    const std::size_t budget = random() % (total + 1);
    const std::vector<bool> stored = choose_stored(bytes, budget);
    std::size_t on_host = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      EXPECT_FALSE(stored[i] && bytes[i] == 0);
      on_host += stored[i] ? 0 : bytes[i];
    }
    EXPECT_LE(on_host, budget);
  }
}

}  // namespace
}  // namespace castor
