#include "store/gate_groups.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace castor::testing {
namespace {

using Guard = GateGroups::Guard;

/// What a gate has made of one tensor. Outlives the gate.
struct Seen {
  bool held = false;
  bool memory_held = false;
  bool forbidden = false;
};

class FakeWatched final : public WatchedMemory {
 public:
  FakeWatched(const void* tensor, const void* memory, Seen& seen)
      : tensor_(tensor), memory_(memory), seen_(seen) {}

  [[nodiscard]] const void* tensor() const noexcept override { return tensor_; }
  [[nodiscard]] const void* memory() const noexcept override { return memory_; }
  void hold_back() override { seen_.held = seen_.memory_held = true; }
  void let_tensor_go() override { seen_.held = false; }
  void let_memory_go() override { seen_.memory_held = false; }
  void forbid() override { seen_.forbidden = true; }
  void allow() noexcept override { seen_.forbidden = false; }

 private:
  const void* const tensor_;
  const void* const memory_;
  Seen& seen_;
};

/// Three groups; group i watches tensor i from the beginning.
class GateGroupsTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kGroups = 3;

  GateGroupsTest() {
    const auto settle = [this](std::size_t group) {
      if (fails_) {
        throw std::runtime_error("the update failed");
      }
      settled_.push_back(group);
    };
    const auto visit = [this](std::span<const OperatorUse> uses) {
      for (const OperatorUse& use : uses) {
        visited_.emplace_back(use.group, use.writes);
      }
      ++under_way_;
      return std::shared_ptr<void>(this, [this](void*) { --under_way_; });
    };
    gate_ = std::make_shared<GateGroups>(
        kGroups, settle,
        GateGroups::Reader{.reads = [this](std::size_t) { return reads_; },
                           .await = [this](std::size_t) { ++awaited_; }},
        visit);
    for (std::size_t i = 0; i < kGroups; ++i) {
      (void)gate_->watch(i, watched(i));
    }
  }
  [[nodiscard]] std::unique_ptr<WatchedMemory> watched(std::size_t i) {
    return std::make_unique<FakeWatched>(&seen_[i], &seen_[i].memory_held, seen_[i]);
  }
  /// An operator on the group's tensor; returns whether it was let go.
  bool passes(std::size_t group, bool writes = false) {
    bool free = false;
    guard_ = gate_->pass(group, writes, [&] { free = true; });
    return free;
  }
  void expect_held(std::size_t i, bool held) const {
    EXPECT_EQ(seen_[i].held, held) << i;
    EXPECT_EQ(seen_[i].memory_held, held) << i;
  }

  std::vector<Seen> seen_ = std::vector<Seen>(8);
  bool fails_ = false;
  bool reads_ = false;
  int awaited_ = 0;
  int under_way_ = 0;
  std::vector<std::size_t> settled_;
  std::vector<std::pair<std::size_t, bool>> visited_;
  Guard guard_ = Guard::kNone;
  std::shared_ptr<GateGroups> gate_;
};

TEST_F(GateGroupsTest, AClosedGroupIsHeldBackUntilItIsPassed) {
  gate_->close(1);
  expect_held(0, false);
  expect_held(1, true);
  EXPECT_TRUE(seen_[1].forbidden);
  EXPECT_TRUE(passes(1));
  EXPECT_EQ(settled_, std::vector<std::size_t>{1});
  expect_held(1, false);
  EXPECT_FALSE(seen_[1].forbidden);
  EXPECT_TRUE(passes(1));
  EXPECT_EQ(settled_.size(), 1U) << "it is open";
}

TEST_F(GateGroupsTest, OpeningSettlesNothing) {
  gate_->close(0);
  gate_->open(0);
  gate_->open(0);
  expect_held(0, false);
  EXPECT_TRUE(settled_.empty());
}

TEST_F(GateGroupsTest, AFailedUpdateLeavesTheGroupClosed) {
  gate_->close(0);
  fails_ = true;
  EXPECT_THROW(gate_->pass(0), std::runtime_error);
  expect_held(0, true);
  fails_ = false;
  gate_->pass(0);
  EXPECT_EQ(settled_, std::vector<std::size_t>{0});
}

TEST_F(GateGroupsTest, PassAllSettlesEveryClosedGroup) {
  gate_->close(0);
  gate_->close(2);
  gate_->pass_all();
  EXPECT_EQ(settled_, (std::vector<std::size_t>{0, 2}));
}

TEST_F(GateGroupsTest, AReaderHoldsBackThoseThatWriteUntilAnOperatorSeesItsEnd) {
  reads_ = true;
  gate_->share(0);
  expect_held(0, true);
  EXPECT_FALSE(seen_[0].forbidden);
  EXPECT_FALSE(passes(0));
  EXPECT_EQ(awaited_, 0);
  EXPECT_FALSE(passes(0, /*writes=*/true));
  EXPECT_EQ(awaited_, 1);
  reads_ = false;
  EXPECT_TRUE(passes(0));
  expect_held(0, false);
}

TEST_F(GateGroupsTest, AGuardedGroupIsNeverLetGo) {
  gate_->guard(0, Guard::kBrought);
  (void)gate_->watch(0, watched(3));
  expect_held(3, true);
  EXPECT_FALSE(passes(0));
  EXPECT_EQ(guard_, Guard::kBrought);
  gate_->close(0);
  gate_->open(0);
  expect_held(3, true);
}

TEST_F(GateGroupsTest, WhatReplacesAnotherIsHeldBackInItsPlace) {
  gate_->close(0);
  gate_->replace(0, 0, watched(3));
  expect_held(0, false);
  EXPECT_FALSE(seen_[0].forbidden);
  expect_held(3, true);
  EXPECT_TRUE(seen_[3].forbidden);
}

TEST_F(GateGroupsTest, MemoryStaysHeldBackWhileAnotherTensorIsOverIt) {
  gate_->guard(0, Guard::kHeld);
  (void)gate_->watch(0, watched(3));
  (void)gate_->watch(0, std::make_unique<FakeWatched>(&seen_[4], &seen_[3].memory_held, seen_[4]));
  gate_->unwatch(0, &seen_[3]);
  EXPECT_FALSE(seen_[3].held);
  EXPECT_TRUE(seen_[3].memory_held);
  gate_->unwatch(0, &seen_[4]);
  EXPECT_FALSE(seen_[4].memory_held);
}

TEST_F(GateGroupsTest, WorkRunsWhereTheGroupIsHeldBack) {
  int runs = 0;
  gate_->if_held_back(0, [&] { ++runs; });
  EXPECT_EQ(runs, 0);
  gate_->close(0);
  gate_->if_held_back(0, [&] { ++runs; });
  EXPECT_EQ(runs, 1);
}

TEST_F(GateGroupsTest, TheEndLetsAllGo) {
  gate_->close(0);
  gate_->share(1);
  gate_.reset();
  expect_held(0, false);
  expect_held(1, false);
  EXPECT_FALSE(seen_[0].forbidden);
}

TEST_F(GateGroupsTest, AnOperatorVisitsEachGroupOnceAndToWriteItWhereOneOfItsTensorsIsWritten) {
  {
    OperatorVisits visits;
    {
      GuardedUses uses;
      uses.add(gate_, {.group = 0, .writes = false}, Guard::kHeld);
      uses.add(gate_, {.group = 2, .writes = false}, Guard::kHeld);
      EXPECT_FALSE(uses.brought());
      uses.add(gate_, {.group = 0, .writes = true}, Guard::kBrought);
      EXPECT_TRUE(uses.brought());
      uses.visit(visits);
    }
    EXPECT_EQ(visited_, (std::vector<std::pair<std::size_t, bool>>{{0, true}, {2, false}}));
    EXPECT_EQ(under_way_, 1);
    EXPECT_TRUE(OperatorVisits::under_way(*gate_, 0, /*writes=*/true));
    EXPECT_TRUE(OperatorVisits::under_way(*gate_, 2, /*writes=*/false));
    EXPECT_FALSE(OperatorVisits::under_way(*gate_, 2, /*writes=*/true));
    EXPECT_FALSE(OperatorVisits::under_way(*gate_, 1, /*writes=*/false));
  }
  EXPECT_EQ(under_way_, 0);
  EXPECT_FALSE(OperatorVisits::under_way(*gate_, 0, /*writes=*/false));
}

TEST(MemoryWatchersTest, MemoryHasTheLastWatcherUntilNobodyWatchesIt) {
  MemoryWatchers& watchers = MemoryWatchers::instance();
  const auto gate = std::make_shared<GateGroups>(
      2, [](std::size_t) {}, GateGroups::Reader{}, GateGroups::Visit{});
  int memory = 0;
  int unwatched = 0;
  const auto find = [&] { return watchers.find(&memory, [&] { ++unwatched; }); };
  EXPECT_EQ(find().gate.lock(), nullptr);
  EXPECT_EQ(unwatched, 1);
  watchers.add(&memory, {.gate = gate, .group = 0});
  watchers.add(&memory, {.gate = gate, .group = 1});
  EXPECT_EQ(find().gate.lock(), gate);
  EXPECT_EQ(find().group, 1U);
  EXPECT_EQ(unwatched, 1);
  watchers.remove(&memory);
  EXPECT_EQ(find().gate.lock(), nullptr);
  EXPECT_EQ(unwatched, 2);
}

}  // namespace
}  // namespace castor::testing
