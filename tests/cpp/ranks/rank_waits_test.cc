#include "ranks/rank_waits.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_collectives.h"
#include "ranks/shared_collectives.h"

namespace castor {
namespace {

constexpr int kLooks = 3;

struct Process {
  std::shared_ptr<RankWaits> waits = std::make_shared<RankWaits>();
  std::shared_ptr<RankPlace> place = std::make_shared<RankPlace>(waits, 0, 2);
};

std::string nobody() { return "nobody"; }

TEST(RankWaitsTest, AWaitIsToldOfOnceAfterSoManyLooks) {
  const Process process;
  process.place->set("ends a step");
  const RankWaits::Wait wait = process.place->wait([] { return std::string("rank 1"); });
  EXPECT_FALSE(process.waits->look(kLooks));
  EXPECT_FALSE(process.waits->look(kLooks));
  const std::optional<LongWait> told = process.waits->look(kLooks);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->rank, 0);
  EXPECT_EQ(told->size, 2);
  EXPECT_EQ(told->place, "ends a step");
  EXPECT_EQ(told->awaited, "rank 1");
  EXPECT_EQ(told->last, "");
  EXPECT_FALSE(process.waits->look(kLooks));
}

TEST(RankWaitsTest, WhatIsOverIsNotToldOf) {
  const Process process;
  process.place->set("ends a step");
  { const RankWaits::Wait wait = process.place->wait(nobody); }
  EXPECT_FALSE(process.waits->look(1));
}

TEST(RankWaitsTest, WhereAllWereLastIsTold) {
  const Process process;
  process.place->set("ends a pass");
  process.place->met();
  process.place->set("ends a step");
  const RankWaits::Wait wait = process.place->wait(nobody);
  EXPECT_EQ(process.waits->look(1)->last, "ends a pass");
}

TEST(RankWaitsTest, OfThreadsThatWaitTogetherOneIsToldOf) {
  const Process process;
  process.place->set("ends a step");
  const RankWaits::Wait other = process.place->wait(nobody);
  {
    const RankWaits::Wait wait = process.place->wait(nobody);
    EXPECT_TRUE(process.waits->look(1));
    EXPECT_FALSE(process.waits->look(1));
  }
  EXPECT_FALSE(process.waits->look(1)) << "the first has been told of, and goes on";
}

TEST(RankWaitsTest, OneWithoutAPlaceIsToldOfWhenItHasOne) {
  const Process process;
  const RankWaits::Wait wait = process.place->wait(nobody);
  EXPECT_FALSE(process.waits->look(1));
  process.place->set("reads a gradient");
  EXPECT_EQ(process.waits->look(1)->place, "reads a gradient");
}

TEST(RankWaitsTest, AThreadThatIsServedIsNotToldOfAndHidesNoOther) {
  const Process process;
  process.place->set("takes part in a save");
  std::uint64_t served = 0;
  {
    const RankWaits::Wait wait = process.place->wait(nobody);
    served = process.waits->look(1)->thread;
  }
  const RankWaits::Wait wait = process.place->wait(nobody);
  EXPECT_FALSE(process.waits->look(1, std::array{served}));
  std::jthread([&] {
    const RankWaits::Wait other = process.place->wait([] { return std::string("rank 1"); });
    EXPECT_EQ(process.waits->look(1, std::array{served})->awaited, "rank 1");
  });
}

// Rank 1 of those that share memory comes when rank 0 has said that it waits for it.
TEST(RankWaitsTest, ARankThatWaitsNamesThoseThatAreNotThere) {
  ThreadRanks threads(3);
  std::latch told(1);
  threads.run([&](Collectives& group) {
    const Process process;
    const SharedCollectives shared = share_memory(
        group, group.size(), {.place = process.place, .timeout = std::chrono::hours(1)});
    ASSERT_NE(shared.ranks, nullptr) << shared.refusal;
    std::vector<std::byte> all(group.size());
    const auto barrier_at = [&](const std::string& place) {
      shared.ranks->set_place(place);
      shared.ranks->all_gather(std::array{std::byte{1}}, all);
    };
    barrier_at("ends a pass");
    if (group.rank() == 1) {
      told.wait();
    }
    std::jthread looking;
    if (group.rank() == 0) {
      looking = std::jthread([&] {
        std::optional<LongWait> wait;
        while (!(wait = process.waits->look(kLooks))) {
          std::this_thread::yield();
        }
        EXPECT_EQ(wait->place, "ends a step");
        EXPECT_EQ(wait->last, "ends a pass");
        EXPECT_EQ(wait->awaited.substr(0, 16), "rank 1 (process ");
        told.count_down();
      });
    }
    barrier_at("ends a step");
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(3));
}

TEST(RankWaitsTest, AWaitEndsAtTheGroupsTimeout) {
  ThreadRanks threads(2);
  std::latch over(1);
  threads.run([&](Collectives& group) {
    const SharedCollectives shared =
        share_memory(group, group.size(), {.timeout = std::chrono::milliseconds(300)});
    ASSERT_NE(shared.ranks, nullptr) << shared.refusal;
    if (group.rank() == 1) {
      over.wait();
      return;
    }
    std::vector<std::byte> all(group.size());
    try {
      shared.ranks->all_gather(std::array{std::byte{1}}, all);
      ADD_FAILURE() << "it has met nobody";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(") has not come for 1 s, the timeout of "),
                std::string::npos)
          << error.what();
    }
    over.count_down();
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(2));
}

}  // namespace
}  // namespace castor
