#include <gtest/gtest.h>

#include <cstddef>
#include <exception>
#include <future>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/machine.h"
#include "core/runtime.h"
#include "core/steps.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

constexpr std::size_t kChunk = Net::kChunk;
constexpr std::size_t kAll = 2 * kChunk;  // of a chunk on the device: parameters and gradients

/// A row of chunks with gradients; every chunk may be promoted.
struct Placed : SimulatedMachine {
  std::size_t count;

  Placed(std::size_t num_chunks, std::size_t device_bytes, RuntimeOptions options = {})
      : SimulatedMachine(Net::row(num_chunks).layout(), device_bytes, options), count(num_chunks) {
    for (std::size_t i = 0; i < count; ++i) {
      rig.manager->add_payload(chunk_id(i), PayloadKind::kGrad, kChunk);
    }
  }
  [[nodiscard]] std::vector<bool> all() const { return std::vector<bool>(count, true); }
  /// A whole step; what it added to the demand fetches, and the other counters.
  RuntimeCounts train(const Step& step) {
    const std::uint64_t before = runtime->counts().demand_fetches;
    run(step);
    runtime->finish_step();
    rig.expect_consistent();
    RuntimeCounts after = runtime->counts();
    after.demand_fetches -= before;
    return after;
  }
  [[nodiscard]] std::uint32_t pins(std::size_t chunk) const {
    return rig.manager->pins(chunk_id(chunk));
  }
  RuntimeCounts train_and_place(const Step& step) {
    const RuntimeCounts before = train(step);
    if (runtime->placement_due()) {
      runtime->place(all());
    }
    rig.expect_consistent();
    RuntimeCounts after = runtime->counts();
    after.demand_fetches = before.demand_fetches;
    return after;
  }
  [[nodiscard]] std::vector<std::size_t> promoted() const {
    std::vector<std::size_t> result;
    for (std::size_t i = 0; i < count; ++i) {
      if (rig.manager->promoted(chunk_id(i))) {
        result.push_back(i);
      }
    }
    return result;
  }
};

using Ids = std::vector<std::size_t>;

TEST(RuntimePlacementTest, OperatorsOfOtherThreadsAreWaitedFor) {
  Placed machine(3, 3 * kAll);
  const Step step = row_step(3);
  machine.train(step);
  machine.train(step);
  ASSERT_TRUE(machine.runtime->placement_due());
  machine.run({enter(0), exit(0)}, PassMode::kInference);
  std::vector<Pin> pins;
  pins.push_back(machine.runtime->pin_for_operator(chunk_id(0)).value());
  std::promise<void> begins;
  std::exception_ptr failure;
  std::jthread placing([&] {
    begins.set_value();
    try {
      machine.runtime->place(machine.all());
    } catch (...) {
      failure = std::current_exception();
    }
  });
  begins.get_future().wait();
  EXPECT_TRUE(machine.promoted().empty());
  machine.runtime->unpin(pins);
  placing.join();
  EXPECT_FALSE(failure) << "it did not wait";
  EXPECT_EQ(machine.promoted(), (Ids{0, 1, 2}));
}

TEST(RuntimePlacementTest, TheFirstStepByPlanDecides) {
  Placed machine(3, 3 * kAll);
  const Step step = row_step(3);
  EXPECT_FALSE(machine.runtime->placement_due());
  machine.train(step);
  EXPECT_FALSE(machine.runtime->placement_due()) << "the warm-up step lacks what loops keep";
  const RuntimeCounts counts = machine.train_and_place(step);
  EXPECT_EQ(machine.promoted(), (Ids{0, 1, 2}));
  EXPECT_EQ(counts.resident_chunks, 3u);
  EXPECT_EQ(counts.resident_bytes, 3 * kAll);
  EXPECT_EQ(counts.plans, 2u);
  EXPECT_EQ(machine.train_and_place(step).demand_fetches, 0u);
  EXPECT_FALSE(machine.runtime->placement_due()) << "decided until something changes";
  EXPECT_EQ(machine.runtime->counts().plans, 2u);
}

TEST(RuntimePlacementTest, NothingIsDueWhereNothingIsPromoted) {
  for (const RuntimeOptions& options :
       {RuntimeOptions{.policy = PlacementPolicy::kCpu}, RuntimeOptions{.margin_ratio = 0.0}}) {
    Placed machine(2, 2 * kAll, options);
    machine.train(row_step(2));
    machine.train(row_step(2));
    EXPECT_FALSE(machine.runtime->placement_due());
  }
}

TEST(RuntimePlacementTest, ATightBudgetKeepsItsPlan) {
  Placed machine(4, 2 * kChunk);
  machine.train_and_place(row_step(4));
  const RuntimeCounts counts = machine.train_and_place(row_step(4));
  EXPECT_EQ(machine.promoted(), Ids{});
  EXPECT_EQ(counts.plans, 1u);
}

TEST(RuntimePlacementTest, APartOfTheModelIsPromotedAndThePlanKeepsToTheBudget) {
  Placed machine(6, 3 * kAll + 2 * kChunk);
  const Step step = row_step(6);
  for (int i = 0; i < 4; ++i) {
    machine.train_and_place(step);
  }
  EXPECT_EQ(machine.promoted(), (Ids{0, 1, 2})) << "the others share two slots";
  const auto prediction = machine.runtime->prediction();
  ASSERT_TRUE(prediction);
  EXPECT_LE(prediction->peak_device_bytes, 3 * kAll + 2 * kChunk);
  const std::uint64_t before = machine.rig.manager->counts().h2d_bytes;
  machine.train_and_place(step);
  EXPECT_EQ(machine.rig.manager->counts().h2d_bytes - before, prediction->h2d_bytes);
}

TEST(RuntimePlacementTest, AnAllocationGetsTheMemoryThatPromotionsTook) {
  Placed machine(3, 3 * kAll);
  const Step step = row_step(3);
  machine.train_and_place(step);
  machine.train_and_place(step);
  ASSERT_EQ(machine.promoted().size(), 3u);
  // All but the one slot that the module under way needs.
  machine.act(enter(1));
  machine.act(allocate(3 * kAll - kChunk));
  EXPECT_EQ(machine.promoted(), Ids{});
  EXPECT_EQ(machine.pins(1), 1u);
  EXPECT_THROW(machine.act(allocate(1)), OutOfMemory);
  machine.act(release(3 * kAll - kChunk));
  machine.act(exit(1));
  machine.rig.expect_consistent();
}

TEST(RuntimePlacementTest, APinnedChunkGivesUpEverythingButItsSlot) {
  Placed machine(1, kAll);
  machine.train_and_place(row_step(1));
  machine.train_and_place(row_step(1));
  ASSERT_EQ(machine.promoted(), Ids{0});
  machine.act(enter(0));
  machine.act(allocate(kAll - kChunk));
  EXPECT_EQ(machine.promoted(), Ids{});
  EXPECT_TRUE(machine.rig.binder.reads(param_id(0), Rig::initial(0)));
  machine.act(release(kAll - kChunk));
  machine.act(exit(0));
}

TEST(RuntimePlacementTest, AFetchGetsTheMemoryThatPromotionsTook) {
  Placed machine(3, 3 * kAll);
  const Step step = row_step(3);
  machine.train_and_place(step);
  machine.train_and_place(step);
  machine.act(allocate(3 * kAll - kChunk));  // of another thread: only one slot is left
  for (std::size_t i = 0; i < 3; ++i) {
    machine.act(enter(i), PassMode::kInference);
    machine.act(exit(i));
  }
  EXPECT_EQ(machine.promoted(), Ids{});
  machine.act(release(3 * kAll - kChunk));
}

TEST(RuntimePlacementTest, AStepThatNeedsMoreLeavesLessToPromote) {
  Placed machine(4, 4 * kAll);
  machine.train_and_place(row_step(4));
  machine.train_and_place(row_step(4));
  ASSERT_EQ(machine.promoted().size(), 4u);
  machine.train_and_place(row_step(4, kChunk / 4));  // at its peak one chunk's worth in all
  EXPECT_EQ(machine.promoted(), (Ids{0, 1, 2}));
  const std::uint64_t before = machine.rig.manager->counts().demotions;
  machine.train_and_place(row_step(4, kChunk / 4));
  EXPECT_EQ(machine.rig.manager->counts().demotions, before);
  EXPECT_EQ(machine.promoted(), (Ids{0, 1, 2}));
}

TEST(RuntimePlacementTest, AnEvaluationThatTookTheMemoryGivesItBack) {
  Placed machine(3, 3 * kAll);
  machine.train_and_place(row_step(3));
  machine.train_and_place(row_step(3));
  machine.run({enter(0), allocate(3 * kAll - kChunk), release(3 * kAll - kChunk), exit(0)},
              PassMode::kInference);
  EXPECT_LT(machine.promoted().size(), 3u);
  machine.train_and_place(row_step(3));
  EXPECT_EQ(machine.promoted().size(), 3u);
}

TEST(RuntimePlacementTest, WhatOutlivesTheStepKeepsItsRoom) {
  Placed machine(3, 3 * kAll);
  machine.train(row_step(3));
  machine.train(row_step(3));
  machine.act(allocate(1));
  machine.runtime->place(machine.all());
  EXPECT_EQ(machine.promoted(), (Ids{0, 1}));
  machine.rig.expect_consistent();
  EXPECT_LE(machine.runtime->prediction()->peak_device_bytes, 3 * kAll);
}

TEST(RuntimePlacementTest, OnlyBetweenSteps) {
  Placed machine(2, 2 * kAll);
  machine.train(row_step(2));
  machine.train(row_step(2));
  machine.act(enter(0));
  EXPECT_THROW(machine.runtime->place(machine.all()), UsageError);
  machine.act(exit(0));
}

TEST(RuntimePlacementTest, AFailedCopyLeavesAStepThatRuns) {
  Placed machine(3, 3 * kAll);
  machine.train(row_step(3));
  machine.train(row_step(3));
  machine.rig.engine.fail_submit(4);
  EXPECT_THROW(machine.runtime->place(machine.all()), InjectedFailure);
  machine.rig.engine.never_fail();
  EXPECT_EQ(machine.promoted(), Ids{0}) << "the second copy of the second chunk failed";
  machine.train_and_place(row_step(3));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(machine.rig.binder.reads(param_id(i), Rig::initial(i)));
  }
}

TEST(RuntimePlacementTest, DemotionsInAStepThatDivergesAreMadeGoodWhenItRepeats) {
  Placed machine(4, 4 * kAll);
  machine.train_and_place(row_step(4));
  machine.train_and_place(row_step(4));
  const Step other = row_step(2, 3 * kAll / 2);
  machine.train_and_place(other);
  machine.train_and_place(other);
  EXPECT_EQ(machine.runtime->counts().divergent_steps, 2u);
  EXPECT_LE(machine.runtime->prediction()->peak_device_bytes, 4 * kAll);
  machine.train_and_place(row_step(4));
}

}  // namespace
}  // namespace castor
