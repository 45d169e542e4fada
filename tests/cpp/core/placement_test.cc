#include "core/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
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

std::size_t sum(const std::vector<std::size_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
}

/// Chunks as large as their slots, states twice as large as parameters.
HostNeeds row_of_needs(std::size_t chunks) {
  return {.weights = std::vector<std::size_t>(chunks, 20),
          .states = std::vector<std::size_t>(chunks, 40),
          .weights_slot = 10,
          .states_slot = 40};
}

TEST(StoredWeightsTest, NothingIsStoredWhereOnlyStatesHaveToBe) {
  const HostNeeds needs = row_of_needs(30);
  const std::vector<bool> none(30, false);
  for (const std::size_t host : {1'800, 720, 640}) {  // with room for 3 of the states, for 1
    const StoredWeightsChoice choice = choose_stored_weights(needs, host);
    EXPECT_EQ(choice.stored, none) << host;
    EXPECT_EQ(choice.window_slots, 0U) << host;
  }
  EXPECT_NE(choose_stored_weights(needs, 639).stored, none);
}

TEST(StoredWeightsTest, WhatGoesIsSpreadEvenlyAndTheWindowsGrowWithTheHost) {
  const HostNeeds needs = row_of_needs(30);
  const StoredWeightsChoice half = choose_stored_weights(needs, 120 + 80 + 300);
  EXPECT_EQ(half.window_slots, 8U);
  for (std::size_t i = 0; i < 30; ++i) {
    EXPECT_EQ(half.stored[i], i % 2 == 0) << i;
  }
  EXPECT_EQ(choose_stored_weights(needs, 120 + 69).window_slots, 6U);
  const StoredWeightsChoice least = choose_stored_weights(needs, 40 + 50);
  EXPECT_EQ(least.window_slots, 5U);
  EXPECT_EQ(least.stored, std::vector<bool>(30, true));
}

TEST(StoredWeightsTest, WithoutStatesTheirWindowTakesNothing) {
  HostNeeds needs = row_of_needs(30);
  needs.states.assign(30, 0);
  EXPECT_EQ(choose_stored_weights(needs, 600).window_slots, 0U);
  EXPECT_EQ(choose_stored_weights(needs, 599).window_slots, 8U);
  EXPECT_EQ(choose_stored_weights({}, 0).window_slots, 0U);
}

// A host that has room for the windows is never asked for more than it has.
TEST(StoredWeightsTest, WhatStaysAndTheWindowsFitWhereverTheyCan) {
  std::mt19937 random(1);
  const WindowLimits limits;
  int num_possible = 0;
  int num_stored = 0;
  for (int round = 0; round < 20'000; ++round) {
    HostNeeds needs;
    for (std::size_t i = 1 + random() % 40; i > 0; --i) {
      const std::size_t bytes = random() % 5 == 0 ? 0 : 1 + random() % 1'003;
      const std::size_t copies = 1 + random() % 2;  // frozen chunks have no gradients
      needs.weights.push_back(copies * bytes);
      needs.states.push_back(copies == 1 ? 0 : random() % 4 * bytes);
      needs.weights_slot = std::max(needs.weights_slot, bytes);
      needs.states_slot = std::max(needs.states_slot, needs.states.back());
    }
    needs.weights_slot += random() % 50;
    needs.states_slot += random() % 50;
    const std::size_t weights = sum(needs.weights);
    const std::size_t states = std::min(sum(needs.states), needs.states_slot);  // at least
    const std::size_t host = random() % (weights + sum(needs.states) + 1'000);
    const StoredWeightsChoice choice = choose_stored_weights(needs, host);
    ASSERT_EQ(choice.stored.size(), needs.weights.size());
    std::size_t staying = 0;
    bool any = false;
    for (std::size_t i = 0; i < needs.weights.size(); ++i) {
      ASSERT_FALSE(choice.stored[i] && needs.weights[i] == 0);
      any = any || choice.stored[i];
      staying += choice.stored[i] ? 0 : needs.weights[i];
    }
    ASSERT_EQ(any, choice.window_slots > 0) << "a window for nothing";
    const bool all_fit = weights + states <= host;
    ASSERT_EQ(any, !all_fit && weights > 0);
    if (any) {
      ASSERT_GE(choice.window_slots, limits.fewest_for_weights);
      ASSERT_LE(choice.window_slots, limits.most_for_weights);
    }
    if (all_fit || limits.fewest_for_weights * needs.weights_slot + states <= host) {
      ++num_possible;
      ASSERT_LE(staying + choice.window_slots * needs.weights_slot + states, host);
    }
    num_stored += any ? 1 : 0;
  }
  EXPECT_GT(num_possible, 5'000);
  EXPECT_GT(num_stored, 5'000);
}

}  // namespace
}  // namespace castor
