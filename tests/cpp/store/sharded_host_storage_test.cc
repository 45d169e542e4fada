// Host storage of three chunks of 512 bytes, sharded over two ranks, which are threads.

#include "store/sharded_host_storage.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Strings = std::vector<std::string>;

constexpr std::size_t kChunk = 512;
constexpr std::size_t kChunks = 3;
constexpr std::size_t kWindow = ShardedHostStorage::kSlots * kChunk + 63;
constexpr std::size_t kShards = kChunks * kChunk / 2;  // of weights, or of gradients

/// Makes the storage of one rank.
struct Maker {
  explicit Maker(Collectives& ranks, ThreadMessages* messages, std::size_t host_bytes = 1 << 20)
      : host(std::make_shared<MemoryTier>(
            TierKind::kHost, host_bytes,
            std::make_unique<HeapArena>(std::make_shared<LiveBlocks>()))) {
    session.ranks = groups_of(ranks, messages);
    session.backend = std::make_shared<FakeDevice>();
    session.state.rule = adam();
    session.zero_stage = 3;
    layout = std::make_unique<ChunkLayout>(
        SmallModel::row(kChunks, kChunk / 4).layout(kChunk, nullptr, ranks.size()));
  }

  [[nodiscard]] ShardedHostStorage make(std::size_t stage, std::size_t copies = 1) {
    return {*layout, placements, *session.ranks, stage, copies, *host, executor};
  }
  /// Makes it as a session does. `common` is empty unless ranks share host storage.
  [[nodiscard]] ShardedHostStorage make_of_session() {
    SessionOptions none = session;
    none.ranks.reset();
    const RankHostStorage common(*layout, placements, none, host);
    return make_sharded_host_storage(*layout, placements, session, common, *host, executor);
  }

  std::unique_ptr<ChunkLayout> layout;
  std::vector<Placement> placements = std::vector<Placement>(kChunks, Placement::kStream);
  SessionOptions session;
  std::shared_ptr<MemoryTier> host;
  test::SerialExecutor executor;
};

class ShardedHostStorageTest : public ::testing::Test {
 protected:
  static void on_ranks(std::size_t size,
                       const std::function<void(Collectives&, ThreadMessages&)>& work) {
    ThreadMessages messages(size);
    ThreadRanks ranks(size, 0, std::chrono::microseconds(0));
    ranks.run([&](Collectives& rank) { work(rank, messages); });
    EXPECT_EQ(ranks.failures(), Strings(size));
  }
};

TEST_F(ShardedHostStorageTest, OfNobodyIsEmpty) {
  const ShardedHostStorage none;
  EXPECT_EQ(none.stage(), 0U);
  EXPECT_EQ(none.shards(), nullptr);
  EXPECT_EQ(none.stream(), nullptr);
  EXPECT_TRUE(none.sharded().empty());
  EXPECT_EQ(none.shard_bytes() + none.window_bytes() + none.room_for_copies(), 0U);
}

TEST_F(ShardedHostStorageTest, InStage3EachRankPaysForItsShardsAndAWindow) {
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    const ShardedHostStorage storage = maker.make(3);
    EXPECT_EQ(storage.stage(), 3U);
    EXPECT_EQ(storage.sharded(), std::vector<bool>(kChunks, true));
    EXPECT_EQ(storage.shard_bytes(), kShards);
    EXPECT_EQ(storage.window_bytes(), kWindow);
    EXPECT_EQ(maker.host->ledger().used(), 2 * kShards + kWindow);
    EXPECT_EQ(storage.room_for_copies(), ShardedHostStorage::kGradientCopies * kChunk);
    EXPECT_EQ(storage.stream()->num_slots(), ShardedHostStorage::kSlots);
    EXPECT_EQ(storage.shards()->shard(chunk_id(1)).size(), kChunk / 2);
    EXPECT_EQ(storage.shards()->shard(chunk_id(kChunks + 1)).size(), kChunk / 2);
  });
}

TEST_F(ShardedHostStorageTest, InStage2GradientsAloneAreSharded) {
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    const ShardedHostStorage storage = maker.make(2);
    EXPECT_EQ(storage.stage(), 2U);
    EXPECT_EQ(storage.sharded(), std::vector<bool>(kChunks, false));
    EXPECT_EQ(storage.stream(), nullptr);
    EXPECT_EQ(storage.shard_bytes(), 0U);
    EXPECT_EQ(storage.window_bytes(), 0U);
    EXPECT_EQ(maker.host->ledger().used(), kShards);
    EXPECT_FALSE(storage.shards()->sharded(chunk_id(0)));
    EXPECT_TRUE(storage.shards()->sharded(chunk_id(kChunks)));
  });
}

TEST_F(ShardedHostStorageTest, CopiesOfTheWeightsAreKeptBesideEachOther) {
  on_ranks(4, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    const ShardedHostStorage storage = maker.make(3, /*copies=*/2);
    EXPECT_EQ(storage.shard_bytes(), kChunks * kChunk / 4 * 2);
    EXPECT_EQ(storage.shards()->kept_ranks(),
              (std::vector<std::size_t>{rank.rank() % 2, rank.rank() % 2 + 2}));
    // There is one copy of the gradients.
    EXPECT_EQ(maker.host->ledger().used(), storage.shard_bytes() + kChunks * kChunk / 4 + kWindow);
  });
}

TEST_F(ShardedHostStorageTest, FrozenChunksHaveNoGradientsToShard) {
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    SmallModel model;
    model.add(kChunk / 4).add(kChunk / 4, ScalarType::kFloat32, /*trainable=*/false);
    maker.layout = std::make_unique<ChunkLayout>(model.layout(kChunk, nullptr, 2));
    maker.placements.resize(2);
    const ShardedHostStorage storage = maker.make(3);
    EXPECT_TRUE(storage.sharded()[1]);
    EXPECT_FALSE(storage.shards()->sharded(chunk_id(3)));
    EXPECT_EQ(maker.host->ledger().used(), 3 * kChunk / 2 + kWindow);
  });
}

TEST_F(ShardedHostStorageTest, ChunksOnTheDeviceAreFullThere) {
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    maker.placements[1] = Placement::kDevice;
    const ShardedHostStorage storage = maker.make(3);
    EXPECT_EQ(storage.sharded(), (std::vector<bool>{true, false, true}));
    EXPECT_FALSE(storage.shards()->sharded(chunk_id(1)));
    EXPECT_FALSE(storage.shards()->sharded(chunk_id(kChunks + 1)));
    EXPECT_EQ(storage.shard_bytes(), kChunk);
  });
}

TEST_F(ShardedHostStorageTest, WhereNoChunkHasHostStorageEveryRankIsRefused) {
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    maker.placements.assign(kChunks, Placement::kDevice);
    expect_thrown<UsageError>([&] { static_cast<void>(maker.make(3)); },
                              "zero_stage=3 shards weights that have host storage");
    expect_thrown<UsageError>([&] { static_cast<void>(maker.make(2)); },
                              "zero_stage=2 shards gradients that have host storage");
    EXPECT_EQ(maker.host->ledger().used(), 0U);
  });
}

TEST_F(ShardedHostStorageTest, RanksThatPlaceChunksDifferentlyAreAllRefused) {
  on_ranks(3, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    if (rank.rank() == 2) {
      maker.placements[0] = Placement::kDevice;
    }
    expect_thrown<UsageError>([&] { static_cast<void>(maker.make(3)); },
                              "rank 0 and rank 2 place chunks differently");
  });
}

TEST_F(ShardedHostStorageTest, StorageFitsExactlyOrIsRefusedWithItsFigures) {
  constexpr std::size_t kAll = 2 * kShards + kWindow;
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker exact(rank, &messages, kAll);
    EXPECT_EQ(exact.make(3).stage(), 3U);
    EXPECT_EQ(exact.host->ledger().used(), 0U);  // it has gone
  });
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages, 2 * kShards - 1);
    expect_out_of_memory([&] { static_cast<void>(maker.make(3)); }, TierKind::kHost, 2 * kShards,
                         2 * kShards - 1, 2 * kShards - 1);
  });
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages, kAll - 1);
    expect_out_of_memory([&] { static_cast<void>(maker.make(3)); }, TierKind::kHost, kWindow,
                         kWindow - 1, kAll - 1);
    EXPECT_EQ(maker.host->ledger().used(), 0U);
  });
}

TEST_F(ShardedHostStorageTest, ASessionThatIsAloneHasNone) {
  on_ranks(1, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    maker.session.ranks.reset();
    EXPECT_EQ(maker.make_of_session().stage(), 0U);
  });
}

TEST_F(ShardedHostStorageTest, ASessionGetsTheStageThatItAskedFor) {
  for (const std::size_t stage : {2, 3}) {
    on_ranks(2, [&](Collectives& rank, ThreadMessages& messages) {
      Maker maker(rank, &messages);
      maker.session.zero_stage = stage;
      EXPECT_EQ(maker.make_of_session().stage(), stage);
    });
  }
}

TEST_F(ShardedHostStorageTest, WithoutTrainableChunksStage2HasNothingToShard) {
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    SmallModel model;
    model.add(kChunk / 4, ScalarType::kFloat32, /*trainable=*/false);
    maker.layout = std::make_unique<ChunkLayout>(model.layout(kChunk, nullptr, 2));
    maker.placements.resize(1);
    maker.session.zero_stage = 2;
    EXPECT_EQ(maker.make_of_session().stage(), 0U);
    maker.session.zero_stage = 3;
    EXPECT_EQ(maker.make_of_session().stage(), 3U);
  });
}

TEST_F(ShardedHostStorageTest, RanksThatCannotReadEachOthersShardsAreRefusedAStage) {
  on_ranks(2, [](Collectives& rank, ThreadMessages&) {
    Maker maker(rank, nullptr);
    for (const std::size_t stage : {2, 3}) {
      maker.session.zero_stage = stage;
      expect_thrown<UsageError>([&] { static_cast<void>(maker.make_of_session()); },
                                "zero_stage=" + std::to_string(stage) +
                                    " goes with ranks that share host storage here, and these do "
                                    "not (threads");
    }
    for (const std::size_t stage : {0, 1}) {
      maker.session.zero_stage = stage;
      EXPECT_EQ(maker.make_of_session().stage(), 0U);
    }
  });
}

TEST_F(ShardedHostStorageTest, CopiesOfFullWeightsAreRefused) {
  on_ranks(2, [](Collectives& rank, ThreadMessages&) {
    Maker maker(rank, nullptr);
    maker.session.zero_stage = 1;
    maker.session.extra_dp_size = 2;
    expect_thrown<UsageError>([&] { static_cast<void>(maker.make_of_session()); },
                              "extra_dp_size=2 says how many copies of the weights 2 ranks keep in "
                              "shards");
  });
}

TEST_F(ShardedHostStorageTest, WhereRanksShareHostStorageNothingIsSharded) {
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    const RankHostStorage common(*maker.layout, maker.placements, maker.session, maker.host);
    ASSERT_EQ(common.refusal(), "");
    const auto make = [&] {
      return make_sharded_host_storage(*maker.layout, maker.placements, maker.session, common,
                                       *maker.host, maker.executor);
    };
    EXPECT_EQ(make().stage(), 0U);
    maker.session.extra_dp_size = 2;
    expect_thrown<UsageError>([&] { static_cast<void>(make()); },
                              "these 2 ranks keep 1: one on each machine");
  });
}

TEST_F(ShardedHostStorageTest, FullChunksComeTogetherInTheWindow) {
  on_ranks(3, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    maker.layout =
        std::make_unique<ChunkLayout>(SmallModel::row(kChunks, 96).layout(3 * 128, nullptr, 3));
    ShardedHostStorage storage = maker.make(3);
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      std::ranges::fill(storage.shards()->shard(chunk_id(chunk)),
                        static_cast<std::byte>(10 * chunk + rank.rank()));
    }
    barrier(rank);
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      storage.stream()->use(chunk, StreamAccess::kRead, [&](auto payloads) {
        ASSERT_EQ(payloads.front().size(), 384U);
        for (std::size_t i = 0; i < 384; ++i) {
          EXPECT_EQ(payloads.front()[i], static_cast<std::byte>(10 * chunk + i / 128));
        }
      });
    }
    barrier(rank);
  });
}

TEST_F(ShardedHostStorageTest, ThreadsOfARankReadFullChunksAtTheSameTime) {
  on_ranks(2, [](Collectives& rank, ThreadMessages& messages) {
    Maker maker(rank, &messages);
    ShardedHostStorage storage = maker.make(3);
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      std::ranges::fill(storage.shards()->shard(chunk_id(chunk)),
                        static_cast<std::byte>(10 * chunk + rank.rank()));
    }
    barrier(rank);
    {
      std::vector<std::jthread> threads;
      for (std::size_t thread = 0; thread < 3; ++thread) {
        threads.emplace_back([&, thread] {
          for (std::size_t i = 0; i < 12; ++i) {
            const std::size_t chunk = (thread + i) % kChunks;
            storage.stream()->use(chunk, StreamAccess::kRead, [&](auto payloads) {
              EXPECT_EQ(payloads.front().front(), static_cast<std::byte>(10 * chunk));
              EXPECT_EQ(payloads.front().back(), static_cast<std::byte>(10 * chunk + 1));
            });
          }
        });
      }
    }
    barrier(rank);
  });
}

}  // namespace
}  // namespace castor::testing
