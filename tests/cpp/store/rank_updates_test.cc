// Updates that two ranks make together, each of its shards. The ranks are threads.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "store/chunk_updates.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;
using Strings = std::vector<std::string>;

constexpr std::size_t kNumel = 64;
constexpr std::size_t kChunk = 4 * kNumel;
constexpr std::size_t kChunks = 2;
constexpr double kRate = 0.5;

Bytes floats(float value) { return filled_with(value, kNumel); }

/// Returns whether every element is a first step away from 0.
bool updated(const Bytes& values) {
  float value = 0;
  std::memcpy(&value, values.data(), 4);
  return std::abs(value + kRate) < 1e-4 && values == floats(value);
}

/// Runs `work` on two ranks, each with a store; returns what each threw.
Strings run(const StoreOptions& options, const std::function<void(TestStore&, Collectives&)>& work,
            std::size_t size = 2) {
  ThreadMessages messages(size);
  ThreadRanks ranks(size, 0, std::chrono::microseconds(0));
  ranks.run([&](Collectives& rank) {
    StoreOptions own = options;
    own.ranks = groups_of(rank, &messages);
    own.file_name = "rank-" + std::to_string(rank.rank());
    TestStore store(SmallModel::row(kChunks, kNumel).layout(kChunk, nullptr, size), own);
    barrier(rank);
    work(store, rank);
  });
  return ranks.failures();
}

void update(TestStore& store, std::size_t chunk) {
  const ParamUpdate update = store.updates->update_of(param_id(chunk), adam_options(kRate), 1, 1.0);
  store.update(chunk_id(chunk), std::span(&update, 1));
}

struct PlaceCase {
  const char* name;
  StoreOptions options;
};

class RankUpdatesTest : public ::testing::TestWithParam<PlaceCase> {};

TEST_P(RankUpdatesTest, EachRankUpdatesItsShardAndReadsAll) {
  const Strings failures = run(GetParam().options, [](TestStore& store, Collectives& rank) {
    EXPECT_TRUE(store.updates->collective());
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      store.write_gradient(param_id(chunk), floats(1.0F));
      barrier(rank);
      update(store, chunk);
      EXPECT_TRUE(updated(store.read_weights(param_id(chunk))));
      EXPECT_EQ(store.read_state(param_id(chunk), rule_payload(0)).size(), kChunk / 2);
      barrier(rank);
    }
  });
  EXPECT_EQ(failures, Strings(2));
}

TEST_P(RankUpdatesTest, ALoadOnEveryRankIsReadByAll) {
  const Strings failures = run(GetParam().options, [](TestStore& store, Collectives& rank) {
    store.write_weights(param_id(1), floats(7.0F));
    barrier(rank);
    EXPECT_EQ(store.read_weights(param_id(1)), floats(7.0F));
    EXPECT_EQ(store.read_weights(param_id(0)), floats(0.0F));
    barrier(rank);
  });
  EXPECT_EQ(failures, Strings(2));
}

INSTANTIATE_TEST_SUITE_P(
    Places, RankUpdatesTest,
    ::testing::Values(PlaceCase{"Full", {}}, PlaceCase{"Shared", {.shares_host_storage = true}},
                      PlaceCase{"ShardedGradients", {.zero_stage = 2}},
                      PlaceCase{"Sharded", {.zero_stage = 3}},
                      PlaceCase{"Copies", {.zero_stage = 3, .copies = 2}},
                      PlaceCase{"OnDevice",
                                {.placements = {Placement::kDevice, Placement::kDevice},
                                 .device = Computes::kByItself}}),
    [](const auto& one) { return one.param.name; });

TEST(ShardedUpdatesTest, AChunkThatIsStillLeasedIsNotUpdated) {
  const Strings failures = run({.zero_stage = 3}, [](TestStore& store, Collectives& rank) {
    const auto lease = store.weights->lease(chunk_id(0));
    lease->wait(ParamAccess::kRead);
    barrier(rank);
    expect_thrown<UsageError>([&] { store.updates->begin(chunk_id(0)); },
                              "parameters of chunk 0 are about to change while something still "
                              "reads them");
    barrier(rank);
    store.sharded.shards()->leave();
  });
  EXPECT_EQ(failures, Strings(2));
}

TEST(ShardedUpdatesTest, AReaderThatComesAfterTheAnnouncementSeesTheUpdate) {
  const Strings failures = run({.zero_stage = 3}, [](TestStore& store, Collectives& rank) {
    store.write_gradient(param_id(0), floats(1.0F));
    barrier(rank);
    store.updates->begin(chunk_id(0));
    const std::jthread reader([&] { EXPECT_TRUE(updated(store.read_weights(param_id(0)))); });
    const ParamUpdate update = store.updates->update_of(param_id(0), adam_options(kRate), 1, 1.0);
    store.updates->run(chunk_id(0), std::span(&update, 1));
  });
  EXPECT_EQ(failures, Strings(2));
}

TEST(ShardedUpdatesTest, WeightsChangeInUpdatesAndLoadsAlone) {
  const Strings failures = run({.zero_stage = 3}, [](TestStore& store, Collectives& /*rank*/) {
    EXPECT_TRUE(store.states->sharded(chunk_id(0)));
    EXPECT_FALSE(store.states->partly_stored(chunk_id(0)));
    EXPECT_THROW(store.states->check_writable(param_id(0)), UsageError);
    const auto lease = store.weights->lease(chunk_id(0));
    EXPECT_THROW(lease->wait(ParamAccess::kWrite), UsageError);
    lease->wait(ParamAccess::kRead);
  });
  EXPECT_EQ(failures, Strings(2));
}

TEST(ShardedUpdatesTest, ARankThatLeavesIsTheErrorOfWhoReadsItsShards) {
  const Strings failures = run({.zero_stage = 3}, [](TestStore& store, Collectives& rank) {
    if (rank.rank() == 1) {
      store.sharded.shards()->leave();
    } else {
      EXPECT_THROW(
          {
            // Its answers may come until it has left.
            for (;;) {
              static_cast<void>(store.read_weights(param_id(0)));
              store.weights->forget(chunk_id(0));
            }
          },
          Error);
      EXPECT_FALSE(store.weights->torn());
    }
  });
  EXPECT_EQ(failures, Strings(2));
}

TEST(ShardedUpdatesTest, ALoadIsWrittenIntoTheShardsThatARankKeeps) {
  const Strings failures = run(
      {.zero_stage = 3, .copies = 2},
      [](TestStore& store, Collectives& rank) {
        Bytes values(kChunk);
        for (std::size_t i = 0; i < kChunk; ++i) {
          values[i] = static_cast<std::byte>(i);
        }
        store.write_weights(param_id(0), values);
        for (const std::size_t kept : store.sharded.shards()->kept_ranks()) {
          const auto shard = store.sharded.shards()->shard(chunk_id(0), kept);
          EXPECT_TRUE(std::ranges::equal(
              shard, std::span(values).subspan(kept * shard.size(), shard.size())));
        }
        EXPECT_EQ(store.sharded.shards()->kept_ranks().size(), 2U);
        barrier(rank);
      },
      /*size=*/4);
  EXPECT_EQ(failures, Strings(4));
}

TEST(ShardedUpdatesTest, ASnapshotReadsTheShardInPlaceWhileAnUpdateWaits) {
  const Strings failures = run({.zero_stage = 3}, [](TestStore& store, Collectives& rank) {
    store.write_gradient(param_id(0), floats(1.0F));
    barrier(rank);
    store.reads.begin();
    EXPECT_EQ(store.copies->begin(store.chunks(), true, 1 << 20), 0U);
    std::atomic<bool> read = false;
    std::jthread reader([&] {
      const auto shard = store.sharded.shards()->shard(chunk_id(0));
      EXPECT_TRUE(std::ranges::equal(shard, Bytes(kChunk / 2)));
      read = true;
      store.reads.end_all();
    });
    update(store, 0);
    EXPECT_TRUE(read);
    EXPECT_TRUE(updated(store.read_weights(param_id(0))));
    store.copies->end();
  });
  EXPECT_EQ(failures, Strings(2));
}

TEST(SharedUpdatesTest, ALoadOfWholePagesIsInTheMemoryThatRanksShare) {
  constexpr std::size_t kPages = 4;
  constexpr std::size_t kBytes = kPages * 4096;
  ThreadRanks ranks(2, 0, std::chrono::microseconds(0));
  ranks.run([](Collectives& rank) {
    TestStore store(SmallModel::row(1, kBytes / 4).layout(kBytes, nullptr, 2),
                    {.shares_host_storage = true, .ranks = groups_of(rank)});
    Bytes values(kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) {
      values[i] = static_cast<std::byte>(i / 64);
    }
    barrier(rank);
    store.write_weights(param_id(0), values);
    barrier(rank);
    EXPECT_EQ(store.read_weights(param_id(0)), values);
    const std::byte* const common =
        store.shared->weights().storage->common(store.states->weights(chunk_id(0)).host_storage());
    EXPECT_TRUE(std::equal(values.begin(), values.end(), common));
    barrier(rank);
  });
  EXPECT_EQ(ranks.failures(), Strings(2));
}

TEST(GatheredUpdatesTest, ShardsOfOtherRanksAreTheBytesThatAreSent) {
  const Strings failures = run(
      {},
      [](TestStore& store, Collectives& /*rank*/) {
        for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
          store.write_gradient(param_id(chunk), floats(1.0F));
        }
        std::vector<std::vector<ParamUpdate>> updates(kChunks);
        for (std::size_t i = 0; i < kChunks; ++i) {
          updates[i] = {store.updates->update_of(param_id(i), adam_options(kRate), 1, 1.0)};
        }
        std::size_t num_begun = 0;
        store.updates->run_all(updates, num_begun);
        EXPECT_EQ(num_begun, kChunks);
        EXPECT_TRUE(updated(store.read_weights(param_id(0))));
        EXPECT_TRUE(updated(store.read_weights(param_id(1))));
        EXPECT_EQ(store.rank_weights->figures().bytes_sent(), kChunks * 3 * kChunk / 4);
      },
      /*size=*/4);
  EXPECT_EQ(failures, Strings(4));
}

TEST(GatheredUpdatesTest, AnUpdateOnTheDeviceKeepsItsShardUntilItIsGathered) {
  const Strings failures =
      run({.placements = {Placement::kDevice, Placement::kDevice}, .device = Computes::kByItself},
          [](TestStore& store, Collectives& rank) {
            store.write_gradient(param_id(0), floats(1.0F));
            const ParamUpdate update =
                store.updates->update_of(param_id(0), adam_options(kRate), 1, 1.0);
            store.updates->run(chunk_id(0), std::span(&update, 1));
            const Bytes half = store.read_weights(param_id(0));
            const bool first = rank.rank() == 0;
            const auto middle = half.begin() + kChunk / 2;
            EXPECT_EQ(std::any_of(half.begin(), middle, [](auto b) { return b != std::byte{0}; }),
                      first);
            EXPECT_EQ(std::any_of(middle, half.end(), [](auto b) { return b != std::byte{0}; }),
                      !first);
            store.updates->gather(chunk_id(0));
            EXPECT_TRUE(updated(store.read_weights(param_id(0))));
          });
  EXPECT_EQ(failures, Strings(2));
}

TEST(GatheredUpdatesTest, ARankThatLeavesEndsTheOthersUpdate) {
  const Strings failures = run({}, [](TestStore& store, Collectives& rank) {
    if (rank.rank() == 1) {
      rank.leave();
      return;
    }
    update(store, 0);
  });
  EXPECT_NE(failures[0].find("one has let go"), std::string::npos) << failures[0];
  EXPECT_EQ(failures[1], "");
}

}  // namespace
}  // namespace castor::testing
