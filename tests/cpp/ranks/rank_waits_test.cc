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

/// A wait that can be ended, as of a message.
class Message {
 public:
  explicit Message(RankPlace& place)
      : wait_(place.wait(nobody, [this](const std::string& why) { ended_ = why; })) {}
  [[nodiscard]] const std::string& ended() const { return ended_; }

 private:
  std::string ended_;  // why
  const RankWaits::Wait wait_;
};

TEST(RankWaitsLostTest, WaitsThatCanBeEndedAre) {
  const Process process;
  std::string why;
  {
    const RankWaits::Wait cannot = process.place->wait(nobody);
    const RankWaits::Wait can =
        process.place->wait(nobody, [&](const std::string& told) { why = told; });
    process.waits->set_lost("");
    EXPECT_EQ(why, "");
    process.waits->set_lost("rank 2 is lost");
    EXPECT_EQ(why, "rank 2 is lost");
  }
  process.waits->set_lost("rank 1 is lost");
  EXPECT_EQ(why, "rank 2 is lost") << "the wait is over";
}

TEST(RankWaitsLostTest, AWaitThatBeginsAfterALossIsEnded) {
  const Process process;
  process.waits->set_lost("rank 1 is lost");
  EXPECT_EQ(Message(*process.place).ended(), "rank 1 is lost");
}

TEST(RankWaitsLostTest, ARankThatReturnsBeforeAnybodyWaitedIsNotLost) {
  const Process process;
  process.waits->set_lost("rank 1 is lost");
  process.waits->set_lost("");
  EXPECT_EQ(Message(*process.place).ended(), "");
}

TEST(RankWaitsLostTest, ARankThatReturnsAfterAWaitWasEndedStaysLost) {
  const Process process;
  {
    const Message message(*process.place);
    process.waits->set_lost("rank 1 is lost");
    EXPECT_EQ(message.ended(), "rank 1 is lost");
  }
  process.waits->set_lost("");
  EXPECT_EQ(Message(*process.place).ended(), "rank 1 is lost");
}

TEST(RankWaitsLostTest, InTheNextRunNoRankIsLostYet) {
  const Process process;
  process.waits->set_lost("rank 1 is lost");
  EXPECT_EQ(Message(*process.place).ended(), "rank 1 is lost");
  process.waits->set_health(std::make_shared<RankHealth>(0, 2, "node", 1, std::chrono::seconds(1),
                                                         std::chrono::seconds(30)));
  EXPECT_EQ(Message(*process.place).ended(), "");
}

TEST(RankWaitsLostTest, RanksHaveTheNumbersOfTheRun) {
  const auto waits = std::make_shared<RankWaits>();
  RankPlace place(waits, 1, 2, {3, 5});
  EXPECT_EQ(place.name(), "rank 1 of 2") << "nothing is known of the run";
  waits->set_health(std::make_shared<RankHealth>(5, 8, "node", 1, std::chrono::seconds(1),
                                                 std::chrono::seconds(30)));
  EXPECT_EQ(place.name(), "rank 5 of 8");
  EXPECT_EQ(place.name_of(0), "rank 3");
  place.set("ends a step");
  const RankWaits::Wait wait = place.wait(nobody);
  const std::optional<LongWait> told = waits->look(1);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->rank, 5);
  EXPECT_EQ(told->size, 8);
}

// Ranks 0 and 1 share memory; rank 0 alone knows that rank 2, of another machine, is lost.
TEST(RankWaitsLostTest, ARankThatLeavesForALostOneSaysSoToItsMachine) {
  ThreadRanks threads(2);
  threads.run([&](Collectives& group) {
    const auto waits = std::make_shared<RankWaits>();
    waits->set_health(std::make_shared<RankHealth>(
        group.rank(), 3, "node", 1, std::chrono::seconds(1), std::chrono::seconds(30)));
    SharedCollectives shared = share_memory(
        group, group.size(), {.place = std::make_shared<RankPlace>(waits, group.rank(), 2)});
    ASSERT_NE(shared.ranks, nullptr) << shared.refusal;
    if (group.rank() == 0) {
      RankHealth& health = *waits->health();
      health.hear(2, "1\n0\n234\n-\nnode2\nin the forward of the model");
      health.end_records();
      static_cast<void>(health.explain(2, "Connection reset"));
      shared.ranks->leave();
      barrier(group);
      return;
    }
    barrier(group);
    try {
      barrier(*shared.ranks);
      ADD_FAILURE() << "it has met nobody";
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_TRUE(what.starts_with("rank 1 of 3 lost the others: rank 0 (process ")) << what;
      EXPECT_NE(what.find(" has let go of the model, as rank 2 (process 234) has ended or is "
                          "stopped, on host node2, last heard in the forward of the model."),
                std::string::npos)
          << what;
    }
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(2));
}

// Threads wait, one after the other or together, while others tell of a loss and of its end.
TEST(RankWaitsLostTest, ThreadsWaitWhileOthersTellOfALoss) {
  const Process process;
  constexpr int kRounds = 200;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < kRounds; ++round) {
          const Message message(*process.place);
        }
      });
    }
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        process.waits->set_lost(round % 2 == 0 ? "rank 1 is lost" : "");
        static_cast<void>(process.waits->look(kLooks));
      }
    });
  }
  process.waits->set_lost("rank 1 is lost");
  EXPECT_EQ(Message(*process.place).ended(), "rank 1 is lost");
}

}  // namespace
}  // namespace castor
