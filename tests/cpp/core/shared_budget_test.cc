// Several models that take from one device budget.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/machine.h"
#include "core/steps.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

constexpr std::size_t kChunk = Net::kChunk;

TEST(BudgetTest, LedgersTakeFromItTogether) {
  const auto budget = std::make_shared<Budget>(TierKind::kDevice, 100);
  Ledger one(budget, "one");
  Ledger other(budget, "other");
  EXPECT_TRUE(one.try_take(60));
  EXPECT_FALSE(other.try_take(41));
  EXPECT_TRUE(other.try_take(40));
  EXPECT_EQ(one.used(), 60u);
  EXPECT_EQ(other.used(), 40u);
  EXPECT_EQ(one.available(), 0u);
  EXPECT_EQ(budget->used(), 100u);
  one.give_back(60);
  EXPECT_EQ(other.available(), 60u);
  EXPECT_EQ(other.peak(), 100u);
  other.give_back(40);
}

TEST(BudgetTest, EachLedgerHasAWindowOverAll) {
  const auto budget = std::make_shared<Budget>(TierKind::kDevice, 100);
  Ledger one(budget, "one");
  Ledger other(budget, "other");
  EXPECT_TRUE(one.try_take(60));
  one.give_back(50);
  EXPECT_EQ(one.take_window_peak(), 60u);
  EXPECT_EQ(one.take_window_peak(), 10u);
  EXPECT_EQ(other.take_window_peak(), 60u);
  EXPECT_TRUE(other.try_take(20));
  EXPECT_EQ(one.take_window_peak(), 30u) << "whoever took it";
  one.give_back(10);
  other.give_back(20);
}

TEST(BudgetTest, WindowsAreLentAgain) {
  Peaks peaks;
  { const Peaks::Window first(peaks, 7); }
  Peaks::Window second(peaks, 1);
  EXPECT_EQ(second.take(0), 1u);
}

TEST(BudgetTest, WhoLeavesTakesWhatItHasOutOfTheBudget) {
  const auto budget = std::make_shared<Budget>(TierKind::kHost, 100);
  Ledger stays(budget, "stays");
  Ledger leaves(budget, "leaves");
  EXPECT_TRUE(stays.try_take(30));
  Reservation held = leaves.reserve(50, "");
  leaves.leave();
  EXPECT_EQ(budget->used(), 30u);
  EXPECT_EQ(leaves.used(), 0u);
  held.release();
  EXPECT_EQ(budget->used(), 30u);
  EXPECT_TRUE(leaves.try_take(1000)) << "nobody pays";
  leaves.give_back(1000);
  leaves.take_anyway(5);
  leaves.take_unnoted(5);
  leaves.leave();
  EXPECT_EQ(budget->used(), 30u);
  stays.give_back(30);
}

TEST(BudgetTest, ErrorsNameWhoHasWhat) {
  const auto budget = std::make_shared<Budget>(TierKind::kDevice, 100);
  Ledger one(budget, "A (model 1)");
  EXPECT_STREQ(one.out_of_memory(200, "raise it").what(),
               "out of device memory: requested 200 bytes, available 100 bytes of a budget of 100 "
               "bytes. raise it");
  Ledger other(budget, "B (model 2)");
  EXPECT_TRUE(other.try_take(70));
  EXPECT_STREQ(
      one.out_of_memory(200, "raise it").what(),
      "out of device memory: requested 200 bytes, available 30 bytes of a budget of 100 "
      "bytes. raise it. Models of one plugin share this budget: A (model 1) has 0 bytes, B "
      "(model 2) has 70 bytes");
  other.give_back(70);
}

TEST(BudgetTest, ConcurrentLedgersNeverPassIt) {
  const auto budget = std::make_shared<Budget>(TierKind::kDevice, 1000);
  std::atomic<int> violations{0};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (unsigned round = 0; round < 200; ++round) {
        Ledger ledger(budget, "model " + std::to_string(i));
        std::size_t held = 0;
        for (std::size_t k = 0; k < 20; ++k) {
          const std::size_t bytes = 1 + (i * 131 + round * 17 + k * 29) % 300;
          held += ledger.try_take(bytes) ? bytes : 0;
          violations += budget->used() > 1000 ? 1 : 0;
        }
        if (round % 2 == 0) {
          ledger.leave();
        } else {
          ledger.give_back(held);
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(violations, 0);
  EXPECT_EQ(budget->used(), 0u);
}

struct Pair {
  std::shared_ptr<Budget> budget;
  std::shared_ptr<RuntimeGroup> group = std::make_shared<RuntimeGroup>();
  std::unique_ptr<SimulatedMachine> one;
  std::unique_ptr<SimulatedMachine> other;

  explicit Pair(std::size_t chunks, std::size_t of_one = 3, std::size_t of_other = 3)
      : budget(std::make_shared<Budget>(TierKind::kDevice, chunks * kChunk)) {
    one = make("one", of_one);
    other = make("other", of_other);
  }
  [[nodiscard]] std::unique_ptr<SimulatedMachine> make(const std::string& name,
                                                       std::size_t chunks) {
    return std::make_unique<SimulatedMachine>(Net::row(chunks).layout(), budget, name, group,
                                              RuntimeOptions{.warmup_nonmodel_ratio = 0.0});
  }
};

TEST(SharedBudgetTest, ChunksOfAnIdleModelGiveWayFirst) {
  Pair pair(4);
  pair.one->run({enter(0), exit(0), enter(1), exit(1), enter(2), exit(2)});
  EXPECT_EQ(pair.one->rig.manager->slot_bytes(), 3 * kChunk);
  pair.other->run({enter(0), exit(0)}, PassMode::kInference);
  EXPECT_EQ(pair.one->rig.manager->slot_bytes(), 3 * kChunk) << "there is room";
  pair.other->run({enter(1), exit(1), enter(2), exit(2)}, PassMode::kInference);
  EXPECT_EQ(pair.one->rig.manager->slot_bytes(), kChunk);
  EXPECT_EQ(pair.other->rig.manager->slot_bytes(), 3 * kChunk);
  EXPECT_EQ(pair.budget->peak(), 4 * kChunk);
  pair.one->rig.expect_consistent();
  pair.other->rig.expect_consistent();
  pair.one->run({backward(2), backward(1), backward(0)});
  pair.one->runtime->finish_step();
  EXPECT_EQ(pair.one->runtime->counts().pressure_evictions, 0u) << "the other's, not its own";
}

TEST(SharedBudgetTest, AnAllocationOfOneEvictsTheOther) {
  Pair pair(4);
  pair.one->run({enter(0), exit(0), enter(1), exit(1)});
  pair.other->run({enter(0), exit(0), enter(1)});
  pair.other->run({allocate(2 * kChunk)});
  EXPECT_EQ(pair.one->rig.manager->slot_bytes(), 0u);
  EXPECT_EQ(pair.other->rig.manager->slot_bytes(), 2 * kChunk);
  pair.other->run({release(2 * kChunk)});
}

TEST(SharedBudgetTest, WhatUserCodeWroteToAnEvictedChunkGoesToTheHost) {
  Pair pair(2, 1, 2);
  pair.one->run({enter(0)});
  pair.one->rig.write(param_id(0), 9);
  pair.one->run({exit(0)});
  pair.other->run({enter(0), exit(0), enter(1), exit(1)}, PassMode::kInference);
  EXPECT_FALSE(pair.one->rig.manager->resident(chunk_id(0)));
  EXPECT_TRUE(pair.one->rig.host_storage_holds(param_id(0), 9));
}

TEST(SharedBudgetTest, ChunksInUseStay) {
  Pair pair(2, 2, 2);
  pair.one->run({enter(0)});
  pair.other->run({enter(0)}, PassMode::kInference);
  try {
    pair.other->run({enter(1)}, PassMode::kInference);
    FAIL() << "it has no room";
  } catch (const OutOfMemory& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("one has 256 bytes, other has 256 bytes"), std::string::npos) << message;
  }
  EXPECT_EQ(pair.one->rig.manager->pins(chunk_id(0)), 1u);
  pair.one->run({exit(0)});
  pair.other->run({enter(1)}, PassMode::kInference);
}

TEST(SharedBudgetTest, ABackwardThatEndedLetsItsPinsGo) {
  Pair pair(2, 2, 2);
  pair.one->run({enter(0), exit(0), enter(1), exit(1), backward(1), backward(0)});
  EXPECT_EQ(pair.one->rig.manager->pins(chunk_id(0)), 1u);
  pair.other->run({enter(0)});
  pair.other->run({enter(1)});
  EXPECT_EQ(pair.one->rig.manager->slot_bytes(), 0u);
}

TEST(SharedBudgetTest, PlansLeaveRoomForWhatOthersKeep) {
  Pair pair(6, 3, 1);
  pair.other->run({allocate(3 * kChunk)});
  const Step step = row_step(3);
  for (int i = 0; i < 3; ++i) {
    pair.one->run(step);
    pair.one->runtime->finish_step();
  }
  ASSERT_TRUE(pair.one->runtime->trace().has_value());
  EXPECT_EQ(pair.one->runtime->trace()->peak_nonmodel_bytes(), 3 * kChunk);
  EXPECT_EQ(pair.one->runtime->prediction()->smallest_budget_bytes, 4 * kChunk);
  EXPECT_EQ(pair.one->runtime->counts().divergent_steps, 0u);
  const std::uint64_t plans = pair.one->runtime->counts().plans;
  pair.other->run({allocate(2 * kChunk)});
  pair.one->run(step);
  pair.one->runtime->finish_step();
  EXPECT_EQ(pair.one->runtime->counts().plans, plans + 1)
      << "others keep more than it planned with";
  pair.other->run({release(5 * kChunk)});
  pair.one->run(step);
  pair.one->runtime->finish_step();
  EXPECT_EQ(pair.one->runtime->counts().plans, plans + 1);
}

TEST(SharedBudgetTest, AModelThatJoinsFindsAllRoomThatMayBeGiven) {
  Pair pair(4);
  pair.one->run({enter(0), exit(0), enter(1)});
  pair.other->run({enter(0), exit(0)}, PassMode::kInference);
  Runtime::make_way(*pair.group);
  EXPECT_EQ(pair.one->rig.manager->slot_bytes(), kChunk) << "the one in use";
  EXPECT_EQ(pair.other->rig.manager->slot_bytes(), 0u);
  const auto third = pair.make("third", 3);
  pair.one.reset();
  third->run({enter(0), exit(0), enter(1), exit(1), enter(2), exit(2)}, PassMode::kInference);
  EXPECT_EQ(third->rig.manager->slot_bytes(), 3 * kChunk);
}

TEST(SharedBudgetTest, OneAccountOfForeignMemoryCountsOnceAndServesWhoIsLeft) {
  const auto budget = std::make_shared<Budget>(TierKind::kDevice, 4 * kChunk);
  const auto group = std::make_shared<RuntimeGroup>();
  const auto account = std::make_shared<NonModelMemory>(std::make_shared<Ledger>(budget, ""));
  const auto runtime_of = [&](Rig& rig) {
    return std::make_unique<Runtime>(
        *rig.manager, account,
        RuntimeOptions{.warmup_nonmodel_ratio = 0.0, .freed_slots = FreedSlots::kReusedAtOnce},
        [] { return std::uint64_t{0}; }, group);
  };
  Rig rig_of_one(Net::row(2).layout(), budget, "one");
  Rig rig_of_other(Net::row(2).layout(), budget, "other");
  auto one = runtime_of(rig_of_one);
  auto other = runtime_of(rig_of_other);
  for (Runtime* const runtime : {one.get(), other.get()}) {
    runtime->enter(module_id(0), PassMode::kTraining);
    runtime->exit(module_id(0));
  }
  account->make_room(3 * kChunk);
  account->note_allocated(3 * kChunk);
  EXPECT_EQ(budget->used(), 4 * kChunk);
  EXPECT_EQ(rig_of_one.manager->slot_bytes(), 0u);
  EXPECT_EQ(one->bytes_of_others(), 0u) << "its own account has them";
  other.reset();
  rig_of_other.manager->move_to_host();
  one->enter(module_id(0), PassMode::kTraining);
  one->exit(module_id(0));
  account->make_room(kChunk);
  EXPECT_EQ(rig_of_one.manager->slot_bytes(), 0u);
  account->note_freed(3 * kChunk);
  one.reset();
  EXPECT_TRUE(account->orphaned());
}

TEST(SharedBudgetTest, ThreadsThatRunModelsOfTheirOwnNeverPassIt) {
  Pair pair(6);
  std::atomic<int> over{0};
  const auto train = [&](SimulatedMachine& machine) {
    const Step step = {enter(0),    allocate(kChunk), exit(0),     enter(1), exit(1),
                       backward(1), release(kChunk),  backward(0), enter(2), exit(2)};
    for (int i = 0; i < 300; ++i) {
      machine.run(step);
      over += pair.budget->used() > pair.budget->bytes() ? 1 : 0;
      machine.runtime->finish_step();
    }
  };
  std::thread second([&] { train(*pair.other); });
  train(*pair.one);
  second.join();
  EXPECT_EQ(over, 0);
  EXPECT_EQ(pair.budget->used(), 0u);
  pair.one->rig.expect_consistent();
  pair.other->rig.expect_consistent();
}

}  // namespace
}  // namespace castor
