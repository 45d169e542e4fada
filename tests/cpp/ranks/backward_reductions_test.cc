#include "ranks/backward_reductions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_collectives.h"

namespace castor {
namespace {

constexpr std::size_t kChunks = 12;

std::shared_ptr<Collectives> borrowed(Collectives& group) {
  return {&group, [](Collectives*) {}};
}

std::vector<ChunkId> last_to_first() {
  std::vector<ChunkId> order;
  for (std::size_t i = kChunks; i-- > 0;) {
    order.push_back(ChunkId{static_cast<std::uint32_t>(i)});
  }
  return order;
}

struct Seen {
  std::vector<std::vector<bool>> passes;
  std::vector<std::size_t> order;
};

// Ranks complete chunks in almost the same order, skip some, and are slow at different times: all
// reduce the same chunks in the same order, and only those that every rank has.
class BackwardReductionsTest : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, BackwardReductionsTest, ::testing::Values(1, 2, 3, 4));

TEST_P(BackwardReductionsTest, RanksReduceTheSameChunksInTheSameOrder) {
  const std::size_t size = GetParam();
  constexpr int kPasses = 15;
  ThreadRanks threads(size, 3);
  std::vector<Seen> seen(size);
  std::vector<std::vector<std::vector<bool>>> had(
      size, std::vector<std::vector<bool>>(kPasses, std::vector<bool>(kChunks, false)));
  threads.run([&](Collectives& group) {
    Seen& own = seen[group.rank()];
    BackwardReductions reductions(borrowed(group), kChunks, last_to_first(), [&](ChunkId chunk) {
      barrier(group);
      own.order.push_back(index(chunk));
    });
    std::minstd_rand random(static_cast<unsigned>(group.rank()) + 7);
    for (int pass = 0; pass < kPasses; ++pass) {
      std::vector<ChunkId> order = last_to_first();
      for (std::size_t i = 1; i < kChunks; i += 2 + random() % 5) {
        std::swap(order[i], order[i - 1]);
      }
      std::vector<ChunkId> handed;
      for (const ChunkId chunk : order) {
        if (random() % 9 == 0) {
          continue;  // an expert that this rank has no token for
        }
        if (random() % 6 == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (reductions.complete(chunk)) {
          had[group.rank()][static_cast<std::size_t>(pass)][index(chunk)] = true;
          EXPECT_FALSE(reductions.complete(chunk));
          handed.push_back(chunk);
        }
        if (random() % 8 == 0 && !handed.empty()) {
          reductions.wait(handed[random() % handed.size()]);
        }
        if (random() % 8 == 0) {
          static_cast<void>(reductions.wait_for_others(std::chrono::milliseconds(2)));
        }
      }
      own.passes.push_back(reductions.end_pass());
    }
  });
  std::size_t num_reduced = 0;
  for (std::size_t rank = 0; rank < size; ++rank) {
    EXPECT_EQ(threads.failures()[rank], "");
    EXPECT_EQ(seen[rank].order, seen[0].order);
    EXPECT_EQ(seen[rank].passes, seen[0].passes);
  }
  for (std::size_t pass = 0; pass < kPasses; ++pass) {
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      if (seen[0].passes[pass][chunk]) {
        ++num_reduced;
        EXPECT_TRUE(std::ranges::all_of(had, [&](const auto& of) { return of[pass][chunk]; }));
      }
    }
  }
  EXPECT_EQ(num_reduced, seen[0].order.size());
  EXPECT_GT(num_reduced, kPasses * kChunks / 4);
}

TEST(BackwardReductions, ReducesBesideThePass) {
  ThreadRanks threads(2);
  threads.run([&](Collectives& group) {
    BackwardReductions reductions(borrowed(group), kChunks, last_to_first(), [](ChunkId) {});
    for (const ChunkId chunk : last_to_first()) {
      EXPECT_TRUE(reductions.complete(chunk));
      reductions.wait(chunk);  // the pass is not over
    }
    EXPECT_EQ(reductions.end_pass(), std::vector<bool>(kChunks, true));
  });
}

TEST(BackwardReductions, WaitsForOthersOnlyWhereTheyAreNext) {
  using Progress = BackwardReductions::Progress;
  ThreadRanks threads(2);
  threads.run([&](Collectives& group) {
    BackwardReductions reductions(borrowed(group), kChunks, last_to_first(), [](ChunkId) {});
    const auto patience = std::chrono::milliseconds(20);
    if (group.rank() == 0) {
      EXPECT_EQ(reductions.wait_for_others(patience), Progress::kNobodysTurn);
      EXPECT_TRUE(reductions.complete(ChunkId{kChunks - 1}));
      EXPECT_EQ(reductions.wait_for_others(patience), Progress::kNone);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    static_cast<void>(reductions.end_pass());
  });
}

TEST(BackwardReductions, AFailureIsSaidToWhoeverWaits) {
  ThreadRanks threads(1);
  std::string said;
  threads.run([&](Collectives& group) {
    BackwardReductions reductions(borrowed(group), kChunks, last_to_first(), [&](ChunkId chunk) {
      if (index(chunk) == kChunks - 2) {
        throw Error("no disk");
      }
    });
    for (const ChunkId chunk : last_to_first()) {
      try {
        static_cast<void>(reductions.complete(chunk));
        reductions.wait(chunk);
      } catch (const Error& error) {
        said = error.what();
        EXPECT_THROW(static_cast<void>(reductions.end_pass()), Error);
        EXPECT_THROW(reductions.wait(chunk), Error);
        return;
      }
    }
  });
  EXPECT_EQ(said, "no disk");
}

TEST(BackwardReductions, APassThatIsNotEndedIsGivenUpOnEveryRank) {
  ThreadRanks threads(2);
  threads.run([&](Collectives& group) {
    BackwardReductions reductions(borrowed(group), kChunks, last_to_first(), [](ChunkId) {});
    EXPECT_TRUE(reductions.complete(ChunkId{kChunks - 1}));
    if (group.rank() == 0) {
      return;  // an exception, say
    }
    EXPECT_THROW(static_cast<void>(reductions.end_pass()), Error);
  });
}

}  // namespace
}  // namespace castor
