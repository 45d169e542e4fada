// Host storage that ranks of one machine share, of three chunks of a page. The ranks are threads.

#include "store/rank_host_storage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ranks/rank_reduction.h"
#include "ranks/thread_nodes.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Strings = std::vector<std::string>;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kChunks = 3;
constexpr std::size_t kAll = kChunks * kPage;  // of parameters, or of gradients

/// Makes the storage of one rank.
struct Maker {
  explicit Maker(std::shared_ptr<Collectives> ranks, std::size_t host_bytes = 1 << 20)
      : host(std::make_shared<MemoryTier>(
            TierKind::kHost, host_bytes,
            std::make_unique<HeapArena>(std::make_shared<LiveBlocks>()))) {
    session.backend = std::make_shared<FakeDevice>();
    session.state.rule = adam();
    session.ranks = RankGroups{
        .passes = ranks, .gradients = ranks, .updates = ranks, .reads = nullptr, .link = "threads"};
    layout = std::make_unique<ChunkLayout>(
        SmallModel::row(kChunks, kPage / 4).layout(kPage, nullptr, ranks->size()));
  }
  explicit Maker(Collectives& ranks, std::size_t host_bytes = 1 << 20)
      : Maker(std::shared_ptr<Collectives>(&ranks, [](Collectives*) {}), host_bytes) {}

  [[nodiscard]] RankHostStorage make() { return {*layout, placements, session, host}; }

  std::unique_ptr<ChunkLayout> layout;
  std::vector<Placement> placements = std::vector<Placement>(kChunks, Placement::kStream);
  SessionOptions session;
  std::shared_ptr<MemoryTier> host;
};

void on_ranks(std::size_t size, const std::function<void(Collectives&)>& work) {
  ThreadRanks ranks(size, 0, std::chrono::microseconds(0));
  ranks.run(work);
  EXPECT_EQ(ranks.failures(), Strings(size));
}

void expect_none(const RankHostStorage& storage, const std::string& refusal = "") {
  EXPECT_EQ(storage.weights().storage, nullptr);
  EXPECT_EQ(storage.weights().tier, nullptr);
  EXPECT_EQ(storage.gradients().storage, nullptr);
  EXPECT_EQ(storage.bytes(), 0U);
  EXPECT_EQ(storage.room_for_copies(), 0U);
  EXPECT_EQ(storage.refusal(), refusal);
}

TEST(RankHostStorageTest, EachRankPaysItsShareOfOneCopy) {
  for (const std::size_t size : {2, 3, 4}) {
    on_ranks(size, [size](Collectives& ranks) {
      Maker maker(ranks);
      maker.layout =
          std::make_unique<ChunkLayout>(SmallModel::row(kChunks, 768).layout(3072, nullptr, size));
      const RankHostStorage storage = maker.make();
      EXPECT_EQ(storage.refusal(), "");
      EXPECT_EQ(storage.bytes(), 2 * kAll);
      EXPECT_EQ(storage.weights().share.bytes(), (kAll + size - 1) / size);
      EXPECT_EQ(maker.host->ledger().used(), 2 * ((kAll + size - 1) / size));
      EXPECT_EQ(storage.nodes(), 1U);
    });
  }
}

TEST(RankHostStorageTest, ATierHandsOutBlocksOfTheStorage) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    const RankHostStorage storage = maker.make();
    const std::size_t used = maker.host->ledger().used();
    const Block block = storage.weights().tier->allocate(kPage, "");
    EXPECT_TRUE(storage.weights().storage->contains(block.data()));
    EXPECT_FALSE(storage.gradients().storage->contains(block.data()));
    EXPECT_EQ(maker.host->ledger().used(), used);  // it is paid for
    expect_out_of_memory([&] { static_cast<void>(storage.weights().tier->allocate(kAll, "")); },
                         TierKind::kHost, kAll, kAll - kPage, kAll);
  });
}

TEST(RankHostStorageTest, WhatOneRankPublishesAllRanksSee) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    const RankHostStorage storage = maker.make();
    const Block block = storage.weights().tier->allocate(kPage, "");
    if (ranks.rank() == 1) {
      std::fill_n(block.data(), kPage, std::byte{9});
      storage.weights().storage->publish({block.data(), kPage});
    }
    barrier(ranks);
    EXPECT_EQ(block.data()[kPage - 1], std::byte{9});
    barrier(ranks);
  });
}

TEST(RankHostStorageTest, RoomIsLeftForGradientsOnTheirWay) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    const RankHostStorage storage = maker.make();
    EXPECT_EQ(storage.room_for_copies(),
              ShardedHostStorage::kGradientCopies * kPage +
                  RankReduction::window_bytes(kPage, ranks.size(), ranks.size(), ReducedOn::kHost));
  });
}

TEST(RankHostStorageTest, FrozenChunksShareTheirParametersAlone) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    SmallModel model;
    model.add(kPage / 4, ScalarType::kFloat32, /*trainable=*/false);
    maker.layout = std::make_unique<ChunkLayout>(model.layout(kPage, nullptr, 2));
    maker.placements.resize(1);
    const RankHostStorage storage = maker.make();
    EXPECT_NE(storage.weights().storage, nullptr);
    EXPECT_EQ(storage.gradients().storage, nullptr);
    EXPECT_EQ(storage.bytes(), kPage);
    EXPECT_EQ(storage.room_for_copies(), 0U);
  });
}

TEST(RankHostStorageTest, ChunksOfOtherOptimizersAndOnTheDeviceAreNotShared) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    SmallModel model;
    model.add(kPage / 4).add(kPage / 4, ScalarType::kFloat32, true, /*has_state=*/false);
    model.add(kPage / 4);
    maker.layout = std::make_unique<ChunkLayout>(model.layout(kPage, nullptr, 2));
    ASSERT_EQ(maker.layout->chunks().size(), 3U);
    maker.placements[2] = Placement::kDevice;
    EXPECT_EQ(maker.make().bytes(), 2 * kPage);
  });
}

TEST(RankHostStorageTest, WithoutHostStorageThereIsNothingToShare) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    maker.placements.assign(kChunks, Placement::kDevice);
    expect_none(maker.make());
  });
}

TEST(RankHostStorageTest, AProcessThatIsAloneAndOneWithoutARuleShareNothing) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    maker.session.state.rule = nullptr;
    expect_none(maker.make());
    maker.session.state.rule = adam();
    maker.session.ranks.reset();
    expect_none(maker.make());
    EXPECT_EQ(maker.host->ledger().used(), 0U);
  });
}

TEST(RankHostStorageTest, ADeviceThatComputesByItselfLocksTheCommonMemory) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    const auto device = std::make_shared<FakeDevice>(Computes::kByItself);
    maker.session.backend = device;
    {
      const RankHostStorage storage = maker.make();
      EXPECT_EQ(storage.refusal(), "");
      EXPECT_EQ(storage.bytes(), 2 * kAll);
      EXPECT_EQ(device->locked_bytes(), 2 * kAll);
      EXPECT_TRUE(storage.weights().tier->shared_by_processes());
      const Block block = storage.weights().tier->allocate(kPage, "");
      EXPECT_EQ(storage.weights().storage->common(block.data()), block.data());
      block.data()[ranks.rank()] = static_cast<std::byte>(ranks.rank() + 1);
      barrier(ranks);
      EXPECT_EQ(block.data()[0], std::byte{1});
      EXPECT_EQ(block.data()[1], std::byte{2});
      barrier(ranks);
    }
    EXPECT_EQ(device->locked_bytes(), 0U);
  });
}

TEST(RankHostStorageTest, WhereOneRankMayNotLockTheMemoryEachRankHasItsOwn) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    const auto device = std::make_shared<FakeDevice>(Computes::kByItself);
    maker.session.backend = device;
    if (ranks.rank() == 1) {
      device->fail_next();
    }
    const RankHostStorage storage = maker.make();
    expect_none(storage, "each rank has its own, page-locked, as page-locking them was refused");
    EXPECT_EQ(device->locked_bytes(), 0U);
    EXPECT_EQ(maker.host->ledger().used(), 0U);
  });
}

TEST(RankHostStorageTest, OnADeviceThatComputesByItselfRanksMayShardInsteadOfSharing) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    maker.session.backend = std::make_shared<FakeDevice>(Computes::kByItself);
    maker.session.zero_stage = 2;
    expect_none(maker.make(), "zero_stage=2 shards it over all ranks");
  });
}

TEST(RankHostStorageTest, RanksThatPlaceChunksDifferentlyShareNothing) {
  on_ranks(3, [](Collectives& ranks) {
    Maker maker(ranks);
    if (ranks.rank() == 1) {
      maker.placements[0] = Placement::kDevice;
    }
    expect_none(maker.make(), "the ranks place chunks differently");
    EXPECT_EQ(maker.host->ledger().used(), 0U);
  });
}

TEST(RankHostStorageTest, SharesFitExactlyOrAreRefusedWithTheirFigures) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks, kAll);
    const RankHostStorage storage = maker.make();
    EXPECT_EQ(maker.host->ledger().available(), 0U);
  });
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks, kAll - 1);
    expect_out_of_memory([&] { static_cast<void>(maker.make()); }, TierKind::kHost, kAll / 2,
                         kAll / 2 - 1, kAll - 1);
    EXPECT_EQ(maker.host->ledger().used(), 0U);  // that of the parameters has gone back
  });
}

TEST(RankHostStorageTest, EachOfSeveralMachinesHasItsCopy) {
  ThreadMessages messages(4);
  on_ranks(4, [&](Collectives& ranks) {
    Maker maker(on_nodes(ranks, 2, messages));
    const RankHostStorage storage = maker.make();
    EXPECT_EQ(storage.refusal(), "");
    EXPECT_EQ(storage.nodes(), 2U);
    EXPECT_EQ(storage.bytes(), 2 * kAll);
    EXPECT_EQ(storage.weights().share.bytes(), kAll / 2);
  });
}

TEST(RankHostStorageTest, AStageThatShardsOverAllRanksRefusesACopyOnEachMachine) {
  ThreadMessages messages(4);
  on_ranks(4, [&](Collectives& ranks) {
    Maker maker(on_nodes(ranks, 2, messages));
    maker.session.zero_stage = 2;
    const RankHostStorage storage = maker.make();
    expect_none(storage, "zero_stage=2 shards it over all ranks");
    EXPECT_EQ(storage.nodes(), 2U);
  });
}

TEST(RankHostStorageTest, OnOneMachineAStageIsServedBySharing) {
  on_ranks(2, [](Collectives& ranks) {
    Maker maker(ranks);
    maker.session.zero_stage = 3;
    EXPECT_NE(maker.make().weights().storage, nullptr);
  });
}

}  // namespace
}  // namespace castor::testing
