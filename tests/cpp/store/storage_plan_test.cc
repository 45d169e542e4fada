// Four chunks of 4 KiB in fp32, each with 4 KiB of gradients and 8 KiB of Adam's states.

#include "store/storage_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/units.h"
#include "store/activation_pages.h"
#include "store/small_model.h"
#include "store/stored_weights.h"

namespace castor::testing {
namespace {

constexpr std::size_t kChunk = 4096;
constexpr std::size_t kChunks = 4;
constexpr std::size_t kWeights = kChunks * 2 * kChunk;  // with gradients
constexpr std::size_t kStates = kChunks * 2 * kChunk;
// NVMe's alignment may cost so much beside the buffers of a window.
constexpr std::size_t kPadding = kIoAlignment - 1;

std::size_t states_window(std::size_t slots) { return slots * 2 * kChunk + kPadding; }
std::size_t weights_window(std::size_t slots) { return slots * kChunk + kPadding; }

std::vector<bool> all(bool value) { return std::vector<bool>(kChunks, value); }
std::vector<Placement> streamed() { return std::vector<Placement>(kChunks, Placement::kStream); }

OptimizerStateOptions with_nvme(std::uint64_t budget = kGiB) {
  OptimizerStateOptions options{.rule = adam()};
  options.nvme = NvmeOptions{.directories = {"/nowhere"}, .budget_bytes = budget};
  return options;
}

class StoragePlanTest : public ::testing::Test {
 protected:
  [[nodiscard]] StoragePlan plan(const OptimizerStateOptions& options, std::size_t host_bytes,
                                 HostStoragePayer payer = HostStoragePayer::kHostBudget) const {
    return plan_storage(layout_, streamed(), options, host_bytes, payer);
  }

  const ChunkLayout layout_ = SmallModel::row(kChunks, kChunk / 4).layout(kChunk);
};

TEST_F(StoragePlanTest, WithoutNvmeAllStaysOnTheHostHoweverLittleItHas) {
  const StoragePlan found = plan({.rule = adam()}, 0);
  EXPECT_EQ(found.host_bytes, kWeights + kStates);
  EXPECT_EQ(found.nvme_bytes(), 0U);
  EXPECT_EQ(found.stored.states, all(false));
  EXPECT_EQ(found.stored.weights, all(false));
  EXPECT_EQ(found.stored.max_leases, 0U);
}

TEST_F(StoragePlanTest, ChunksOnTheDeviceCountNowhere) {
  std::vector<Placement> placements = streamed();
  placements[1] = placements[3] = Placement::kDevice;
  EXPECT_EQ(plan_storage(layout_, placements, {.rule = adam()}, 0).host_bytes,
            (kWeights + kStates) / 2);
}

TEST_F(StoragePlanTest, KeptChunksHaveTheirStorageOnTheHost) {
  const std::vector<Placement> kept(kChunks, Placement::kKeep);
  EXPECT_EQ(plan_storage(layout_, kept, {.rule = adam()}, 0).host_bytes, kWeights + kStates);
}

TEST_F(StoragePlanTest, FrozenChunksNeedRoomForTheirParametersAlone) {
  SmallModel model;
  model.add(kChunk / 4).add(kChunk / 4, ScalarType::kFloat32, /*trainable=*/false);
  const ChunkLayout layout = model.layout(kChunk);
  const std::vector<Placement> placements(2, Placement::kStream);
  EXPECT_EQ(plan_storage(layout, placements, {.rule = adam()}, 0).host_bytes, 4 * kChunk + kChunk);
}

TEST_F(StoragePlanTest, ChunksOfAnotherOptimizerHaveNoStates) {
  SmallModel model;
  model.add(kChunk / 4).add(kChunk / 4, ScalarType::kFloat32, true, /*has_state=*/false);
  const ChunkLayout layout = model.layout(kChunk);
  const std::vector<Placement> placements(2, Placement::kStream);
  EXPECT_EQ(plan_storage(layout, placements, {.rule = adam()}, 0).host_bytes,
            4 * kChunk + 2 * kChunk);
}

TEST_F(StoragePlanTest, WithoutARuleThereAreNoStates) {
  EXPECT_EQ(plan({}, 0).host_bytes, kWeights);
}

TEST_F(StoragePlanTest, EachRankHasRoomForItsShardOfTheStates) {
  const ChunkLayout layout =
      SmallModel::row(kChunks, kChunk / 4).layout(kChunk, adam().get(), /*ranks=*/2);
  EXPECT_EQ(plan_storage(layout, streamed(), {.rule = adam()}, 0).host_bytes,
            kWeights + kStates / 2);
}

TEST_F(StoragePlanTest, StorageThatRanksShareIsPaidForAlreadyButNotThatOfOtherOptimizers) {
  SmallModel model;
  model.add(kChunk / 4).add(kChunk / 4, ScalarType::kFloat32, true, /*has_state=*/false);
  const ChunkLayout layout = model.layout(kChunk);
  const std::vector<Placement> placements(2, Placement::kStream);
  EXPECT_EQ(
      plan_storage(layout, placements, {.rule = adam()}, 0, HostStoragePayer::kRankHostStorage)
          .host_bytes,
      2 * kChunk + 2 * kChunk);
}

TEST_F(StoragePlanTest, ShardedWeightsLeaveTheStatesToTheHost) {
  EXPECT_EQ(plan({.rule = adam()}, 0, HostStoragePayer::kSharded).host_bytes, kStates);
}

TEST_F(StoragePlanTest, ShardedGradientsLeaveParametersAndStatesToTheHost) {
  EXPECT_EQ(plan({.rule = adam()}, 0, HostStoragePayer::kShardedGradients).host_bytes,
            kWeights / 2 + kStates);
}

TEST_F(StoragePlanTest, WhatFitsExactlyStaysOnTheHost) {
  const StoragePlan found = plan(with_nvme(), kWeights + kStates);
  EXPECT_EQ(found.host_bytes, kWeights + kStates);
  EXPECT_EQ(found.nvme_bytes(), 0U);
  EXPECT_EQ(found.stored.states, all(false));
}

TEST_F(StoragePlanTest, OneByteLessMovesStatesAndNoWeights) {
  const StoragePlan found = plan(with_nvme(), kWeights + kStates - 1);
  EXPECT_EQ(found.stored.states, all(true));
  EXPECT_EQ(found.stored.weights, all(false));
  EXPECT_EQ(found.nvme[StoragePlan::kStates].num_slots, 3U);
  EXPECT_EQ(found.host_bytes, kWeights + states_window(3));
  EXPECT_EQ(found.nvme_bytes(), kStates);
}

TEST_F(StoragePlanTest, StatesThatTheWindowLeavesRoomForStay) {
  // Twelve chunks of 8 KiB of states each; the window takes those of three.
  const ChunkLayout layout = SmallModel::row(12, kChunk / 4).layout(kChunk);
  const std::vector<Placement> placements(12, Placement::kStream);
  const std::size_t host = 12 * 2 * kChunk + states_window(3) + 4 * 2 * kChunk;
  const StoragePlan found = plan_storage(layout, placements, with_nvme(), host);
  EXPECT_EQ(std::count(found.stored.states.begin(), found.stored.states.end(), false), 4);
  EXPECT_EQ(found.host_bytes, host);
  EXPECT_EQ(found.nvme_bytes(), 8 * 2 * kChunk);
  EXPECT_FALSE(found.stored.states[2]);  // they are spread evenly
}

TEST_F(StoragePlanTest, TheWindowOfStatesShrinksToOneBuffer) {
  const StoragePlan found = plan(with_nvme(), kWeights + states_window(1));
  EXPECT_EQ(found.nvme[StoragePlan::kStates].num_slots, 1U);
  EXPECT_EQ(found.stored.weights, all(false));
  EXPECT_EQ(found.host_bytes, kWeights + states_window(1));
}

TEST_F(StoragePlanTest, WeightsGoWhereNoWindowOfStatesIsLeft) {
  const std::size_t host = kWeights + states_window(1) - 1;
  const StoragePlan found = plan(with_nvme(), host);
  EXPECT_EQ(found.stored.weights, all(true));
  EXPECT_EQ(found.stored.states, all(true));
  EXPECT_EQ(found.nvme[StoragePlan::kWeights].num_slots, StoredWeights::kLeastSlots);
  EXPECT_EQ(found.nvme[StoragePlan::kStates].num_slots, 2U);
  EXPECT_EQ(found.stored.max_leases, 1U);
  EXPECT_EQ(found.host_bytes, weights_window(5) + states_window(2));
  EXPECT_EQ(found.nvme_bytes(), kWeights + kStates);
}

TEST_F(StoragePlanTest, ASessionThatWillBeRefusedIsToldItsSmallestNeed) {
  EXPECT_EQ(plan(with_nvme(), 0).host_bytes,
            weights_window(StoredWeights::kLeastSlots) + states_window(1));
}

TEST_F(StoragePlanTest, AFractionOfTheStatesGoesThoughTheHostHasRoom) {
  OptimizerStateOptions options = with_nvme();
  options.nvme_fraction = 0.5;
  const StoragePlan found = plan(options, kGiB);
  EXPECT_EQ(found.stored.states, (std::vector<bool>{true, false, true, false}));
  EXPECT_EQ(found.host_bytes, kWeights + kStates / 2 + states_window(3));
  EXPECT_EQ(found.nvme_bytes(), kStates / 2);
  options.nvme_fraction = 1.0;
  EXPECT_EQ(plan(options, kGiB).stored.states, all(true));
}

TEST_F(StoragePlanTest, PayloadsOnNvmeAreNamedByKindAndChunk) {
  const StoragePlan found = plan(with_nvme(), 0);
  const NvmeContent& weights = found.nvme[StoragePlan::kWeights];
  const NvmeContent& states = found.nvme[StoragePlan::kStates];
  ASSERT_EQ(weights.chunks.size(), 2 * kChunks);
  EXPECT_EQ(weights.chunks[1][0].name, "parameters of chunk 1");
  EXPECT_EQ(weights.chunks[kChunks + 2][0].name, "gradients of chunk 2");
  ASSERT_EQ(states.chunks[3].size(), 2U);
  EXPECT_EQ(states.chunks[3][0].name, "exp_avg of chunk 3");
  EXPECT_EQ(states.chunks[3][1].name, "exp_avg_sq of chunk 3");
  EXPECT_EQ(states.chunks[3][1].bytes, kChunk);
}

class ActivationPlanTest : public StoragePlanTest {
 protected:
  [[nodiscard]] StoragePlan plan_activations(std::uint64_t budget, std::size_t host_bytes) const {
    OptimizerStateOptions options = with_nvme(budget);
    options.nvme->holds_activations = true;
    return plan(options, host_bytes);
  }
  static std::size_t window(std::size_t slots) {
    return slots * ActivationPages::kPageBytes + kPadding;
  }
};

TEST_F(ActivationPlanTest, ActivationsGetTheWholePagesThatTheBudgetHasLeft) {
  const std::uint64_t pages = 3 * ActivationPages::kPageBytes;
  for (const std::uint64_t rest : {std::uint64_t{0}, ActivationPages::kPageBytes - 1}) {
    const StoragePlan found = plan_activations(pages + rest, kGiB);
    EXPECT_EQ(found.nvme[StoragePlan::kActivations].chunks.size(), 3U);
    EXPECT_EQ(found.nvme_bytes(), pages);
    EXPECT_EQ(found.host_bytes, kWeights + kStates + window(ActivationPages::kSlots));
  }
}

TEST_F(ActivationPlanTest, StatesOnNvmeComeBeforePagesOfActivations) {
  const std::size_t host = window(ActivationPages::kSlots) + kWeights + states_window(3);
  const StoragePlan found = plan_activations(kStates + ActivationPages::kPageBytes, host);
  EXPECT_EQ(found.stored.states, all(true));
  EXPECT_EQ(found.nvme[StoragePlan::kActivations].chunks.size(), 1U);
  EXPECT_EQ(found.host_bytes, host);
}

TEST_F(ActivationPlanTest, TheWindowOfActivationsShrinksToTwoBuffers) {
  const StoragePlan found = plan_activations(kGiB, 0);
  EXPECT_EQ(found.nvme[StoragePlan::kActivations].num_slots, ActivationPages::kLeastSlots);
  EXPECT_EQ(plan_activations(kGiB, window(5)).nvme[StoragePlan::kActivations].num_slots, 5U);
}

TEST_F(ActivationPlanTest, WithoutAPageThereIsNoWindowToPayFor) {
  const StoragePlan found = plan_activations(ActivationPages::kPageBytes - 1, kGiB);
  EXPECT_TRUE(found.nvme[StoragePlan::kActivations].chunks.empty());
  EXPECT_EQ(found.nvme_bytes(), 0U);
  EXPECT_EQ(found.host_bytes, kWeights + kStates);
}

TEST(StoragePlanOfNothingTest, AModelWithoutElementsHasTheStorageOfItsAlignment) {
  SmallModel model;
  model.add(0);
  const ChunkLayout layout = model.layout(kParamAlignment);
  const Placement placement = Placement::kStream;
  EXPECT_EQ(plan_storage(layout, std::span(&placement, 1), {.rule = adam()}, 0).host_bytes,
            4 * kParamAlignment);
}

}  // namespace
}  // namespace castor::testing
