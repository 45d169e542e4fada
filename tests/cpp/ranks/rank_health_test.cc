#include "ranks/rank_health.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace castor {
namespace {

using std::chrono::milliseconds;

constexpr int kLooks = 8;  // a second each
constexpr milliseconds kInterval{50};

/// Ranks of a run; their records go from one to the other where a test says so.
class RankHealthTest : public ::testing::Test {
 protected:
  explicit RankHealthTest(std::size_t size = 3) {
    for (std::size_t rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<RankHealth>(rank, size, "node" + std::to_string(rank),
                                                    100 + static_cast<int>(rank), kInterval,
                                                    std::chrono::seconds(kLooks)));
    }
  }

  RankHealth& rank(std::size_t number) { return *ranks_[number]; }
  /// Rank 0 reads a new record of each of `speaking`, and is through with a round.
  void hear(const std::vector<std::size_t>& speaking) {
    for (const std::size_t number : speaking) {
      rank(0).hear(number, rank(number).beat());
    }
    rank(0).end_round();
  }
  void look(int times) {
    for (int i = 0; i < times; ++i) {
      rank(0).look(std::chrono::seconds(1));
    }
  }
  /// Rank 0 looks, and hears these meanwhile.
  void look_and_hear(int times, const std::vector<std::size_t>& speaking) {
    for (int i = 0; i < times; ++i) {
      hear(speaking);
      look(1);
    }
  }
  std::string lost() { return rank(0).find_lost().why; }

  std::vector<std::unique_ptr<RankHealth>> ranks_;
};

TEST_F(RankHealthTest, ARankThatIsHeardNoMoreIsLostAfterSoManyLooks) {
  rank(2).enter("forward", "layers.2");
  rank(2).set_place("sums the outputs of tensor-parallel layers");
  look_and_hear(2, {1, 2});
  look_and_hear(kLooks - 2, {1});
  EXPECT_EQ(lost(), "");
  look_and_hear(1, {1});
  EXPECT_EQ(lost(),
            "rank 2 (process 102) has not been heard for 8 s: it has ended or is stopped, or its "
            "machine is gone, on host node2, last heard in the forward of module 'layers.2', where "
            "it sums the outputs of tensor-parallel layers");
  look_and_hear(1, {1, 2});
  EXPECT_EQ(lost(), "") << "it goes on";
}

TEST_F(RankHealthTest, AModuleTakesThePlaceOfWhatTheRankDidBefore) {
  rank(1).set_place("boosts a model");
  hear({1});
  EXPECT_EQ(rank(0).last_of(1), ", on host node1, last heard where it boosts a model");
  rank(1).enter("backward", "");
  hear({1});
  EXPECT_EQ(rank(0).last_of(1), ", on host node1, last heard in the backward of the model");
  EXPECT_EQ(rank(0).last_of(2), "") << "it was never heard";
}

TEST_F(RankHealthTest, WhoWasNeverHeardIsNotLost) {
  look_and_hear(3 * kLooks, {1});
  EXPECT_EQ(lost(), "");
  const std::string of_its_past = rank(2).beat();
  for (int i = 0; i < 3 * kLooks; ++i) {
    rank(0).hear(2, of_its_past);
    look_and_hear(1, {1});
  }
  EXPECT_EQ(lost(), "") << "its record is of a process before";
}

TEST_F(RankHealthTest, WhoHasEndedWellIsNotLost) {
  look_and_hear(2, {1, 2});
  rank(2).end();
  look_and_hear(1, {1, 2});
  look_and_hear(3 * kLooks, {1});
  EXPECT_EQ(lost(), "");
}

TEST_F(RankHealthTest, AStoreThatIsSilentIsRankZeros) {
  look_and_hear(2, {1, 2});
  look(kLooks - 1);
  EXPECT_EQ(lost(), "") << "the others are not heard for its sake";
  look(1);
  EXPECT_NE(lost().find("rank 0, which keeps torch.distributed's store itself or by its launcher, "
                        "has not answered for 8 s"),
            std::string::npos)
      << lost();
  hear({1, 2});
  EXPECT_EQ(lost(), "");
}

// A look may be longer than the store may be silent without a word.
TEST_F(RankHealthTest, AStoreThatAnsweredSinceTheLastLookIsNotSilent) {
  ranks_[0] = std::make_unique<RankHealth>(0, 3, "node0", 100, kInterval, std::chrono::seconds(2));
  look_and_hear(2, {1, 2});
  look_and_hear(1, {1});
  EXPECT_NE(lost().find("rank 2 (process 102) has not been heard for 2 s"), std::string::npos)
      << lost();
}

TEST_F(RankHealthTest, WhereTheStoreHasEndedNobodyIsLostByIt) {
  look_and_hear(2, {1, 2});
  rank(0).end_records();
  look(3 * kLooks);
  EXPECT_EQ(lost(), "");
}

TEST_F(RankHealthTest, ARankThatLostAnotherOneIsNotTheOneThatIsNamed) {
  look_and_hear(2, {1, 2});
  rank(1).hear(2, rank(2).beat());
  rank(1).end_records();
  EXPECT_EQ(rank(1).explain(2, "Connection closed"),
            "rank 2 (process 102) has ended or is stopped (Connection closed), on host node2");
  hear({1});
  EXPECT_EQ(rank(0).explain(1, "Connection reset"),
            "rank 2 (process 102) has ended or is stopped (Connection reset), on host node2");
}

TEST_F(RankHealthTest, AConnectionThatFailsWhileItsRankIsHeardIsToldAsThat) {
  look_and_hear(2, {1, 2});
  auto why =
      std::async(std::launch::async, [&] { return rank(0).explain(1, "Timed out waiting 5 s"); });
  while (why.wait_for(milliseconds(1)) != std::future_status::ready) {
    hear({1, 2});
  }
  EXPECT_EQ(why.get(),
            "rank 1 (process 101) cannot be reached (Timed out waiting 5 s), on host node1");
}

TEST_F(RankHealthTest, TheNextRecordIsDueAtOnceWhenARankIsLostOrEnds) {
  EXPECT_TRUE(rank(0).await_beat()) << "the first one";
  static_cast<void>(rank(0).beat());
  hear({1, 2});
  rank(0).end_records();
  static_cast<void>(rank(0).explain(1, "Connection closed"));
  EXPECT_TRUE(rank(0).await_beat());
  EXPECT_NE(rank(0).beat().find("\n1\nnode0\n"), std::string::npos);
  rank(0).end();
  EXPECT_FALSE(rank(0).await_beat()) << "the last one";
}

}  // namespace
}  // namespace castor
