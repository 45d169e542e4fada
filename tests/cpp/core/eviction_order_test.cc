#include "core/eviction_order.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "core/fakes.h"

namespace castor {
namespace {

using testing::chunk_id;

TEST(EvictionOrderTest, EmptyOrderHasNoVictim) {
  EvictionOrder order(3);
  EXPECT_TRUE(order.empty());
  EXPECT_EQ(order.victim(0), std::nullopt);
  order.remove(chunk_id(1));
  EXPECT_TRUE(order.empty());
  EvictionOrder none(0);
  EXPECT_EQ(none.victim(0), std::nullopt);
}

TEST(EvictionOrderTest, FurthestNextUseGoesFirst) {
  EvictionOrder order(4);
  order.put(chunk_id(0), 7);
  order.put(chunk_id(1), 9);
  order.put(chunk_id(2), 8);
  for (const std::size_t expected : {1, 2, 0}) {
    const auto victim = order.victim(5);
    ASSERT_EQ(victim, chunk_id(expected));
    order.remove(*victim);
  }
  EXPECT_TRUE(order.empty());
}

TEST(EvictionOrderTest, NeverUsedGoesBeforeAnyUse) {
  EvictionOrder order(3);
  order.put(chunk_id(0), kNeverUsed - 1);
  order.put(chunk_id(1), kNeverUsed);
  EXPECT_EQ(order.victim(0), chunk_id(1));
}

TEST(EvictionOrderTest, TiesGoByLowestId) {
  EvictionOrder order(5);
  for (const std::size_t id : {4, 2, 3}) {
    order.put(chunk_id(id), kNeverUsed);
  }
  EXPECT_EQ(order.victim(0), chunk_id(2));
}

TEST(EvictionOrderTest, TiesBetweenCostClassesGoByLowestIdToo) {
  EvictionOrder order(5);
  order.put(chunk_id(3), kNeverUsed, 1.0);
  order.put(chunk_id(1), kNeverUsed, 4.0);
  EXPECT_EQ(order.victim(0), chunk_id(1)) << "a chunk that never returns costs nothing";
  order.put(chunk_id(3), 10, 1.0);
  order.put(chunk_id(1), 40, 4.0);
  EXPECT_EQ(order.victim(0), chunk_id(1)) << "10 / 1 == 40 / 4";
  order.put(chunk_id(0), 10, 1.0);
  EXPECT_EQ(order.victim(0), chunk_id(0));
}

TEST(EvictionOrderTest, CostWeighsAgainstDistance) {
  EvictionOrder order(2);
  order.put(chunk_id(0), 110, 2.0);  // distance 10, as if 5
  order.put(chunk_id(1), 106, 1.0);  // distance 6
  EXPECT_EQ(order.victim(100), chunk_id(1));
  EXPECT_EQ(order.victim(0), chunk_id(1)) << "55 < 106";
  order.put(chunk_id(0), 113, 2.0);
  EXPECT_EQ(order.victim(100), chunk_id(0)) << "6.5 > 6";
}

TEST(EvictionOrderTest, PutMovesAChunk) {
  EvictionOrder order(2);
  order.put(chunk_id(0), 5);
  order.put(chunk_id(1), 6);
  order.put(chunk_id(0), 7, 1.0);
  EXPECT_EQ(order.victim(0), chunk_id(0));
  order.put(chunk_id(0), 7, 3.0);
  EXPECT_EQ(order.victim(0), chunk_id(1));
  EXPECT_TRUE(order.contains(chunk_id(0)));
  order.remove(chunk_id(0));
  EXPECT_FALSE(order.contains(chunk_id(0)));
  EXPECT_FALSE(order.empty());
}

TEST(EvictionOrderTest, HorizonSparesWhatIsNeededBefore) {
  EvictionOrder order(3);
  order.put(chunk_id(0), 5);
  order.put(chunk_id(1), 9, 4.0);
  EXPECT_EQ(order.victim_from(0, 10), std::nullopt);
  EXPECT_EQ(order.victim_from(0, 9), chunk_id(1)) << "the cheaper one is needed earlier";
  EXPECT_EQ(order.victim_from(0, 5), chunk_id(0));
  EXPECT_EQ(order.victim_from(0, 0), order.victim(0));
}

TEST(EvictionOrderTest, OverdueUsesAreTheNearest) {
  EvictionOrder order(2);
  order.put(chunk_id(0), 3);
  EXPECT_EQ(order.victim(100), chunk_id(0)) << "still a victim when it is the only one";
  order.put(chunk_id(1), 101);
  EXPECT_EQ(order.victim(100), chunk_id(1));
}

TEST(EvictionOrderTest, AgreesWithALinearScan) {
  constexpr std::size_t kChunks = 12;
  const double costs[] = {1.0, 2.0, 8.0};
  std::mt19937 random(7);
  EvictionOrder order(kChunks);
  std::map<std::size_t, std::pair<std::uint64_t, double>> model;
  for (int i = 0; i < 50000; ++i) {
    const std::size_t id = random() % kChunks;
    if (random() % 3 == 0) {
      order.remove(chunk_id(id));
      model.erase(id);
    } else {
      const std::uint64_t next_use = random() % 5 == 0 ? kNeverUsed : random() % 32;
      const double cost = costs[random() % 3];
      order.put(chunk_id(id), next_use, cost);
      model[id] = {next_use, cost};
    }
    const std::uint64_t now = random() % 32;
    const std::uint64_t horizon = random() % 32;
    // In a class of equal cost the later use goes first even when both are overdue.
    std::optional<ChunkId> expected;
    double best = -1.0;
    for (const double cost : costs) {
      std::optional<std::pair<std::uint64_t, std::size_t>> furthest;
      for (const auto& [chunk, entry] : model) {
        if (entry.second == cost && (!furthest || entry.first > furthest->first)) {
          furthest = {entry.first, chunk};
        }
      }
      if (!furthest || furthest->first < horizon) {
        continue;
      }
      const double score =
          furthest->first == kNeverUsed
              ? 1e300
              : static_cast<double>(furthest->first > now ? furthest->first - now : 0) / cost;
      if (score > best || (score == best && chunk_id(furthest->second) < *expected)) {
        best = score;
        expected = chunk_id(furthest->second);
      }
    }
    ASSERT_EQ(order.victim_from(now, horizon), expected) << "operation " << i;
    ASSERT_EQ(order.empty(), model.empty());
  }
}

}  // namespace
}  // namespace castor
