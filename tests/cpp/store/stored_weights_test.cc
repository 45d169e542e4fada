// Parameters and gradients of three chunks of 4 KiB on NVMe, behind a window of five buffers.

#include "store/stored_weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

#include "core/random_bytes.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kChunk = 4096;
constexpr std::size_t kChunks = 3;

TEST(StoredWeightsPartsTest, PartsAreParametersThenGradientsOfTheStoredChunks) {
  SmallModel model;
  model.add(16).add(16, ScalarType::kFloat32, /*trainable=*/false).add(16);
  const auto parts = StoredWeights::parts_of(model.layout(64), {true, true, false});
  ASSERT_EQ(parts.size(), 6U);
  ASSERT_EQ(parts[0].size(), 1U);
  EXPECT_EQ(parts[0][0].name, "parameters of chunk 0");
  EXPECT_EQ(parts[0][0].bytes, 64U);
  EXPECT_EQ(parts[1][0].name, "parameters of chunk 1");
  EXPECT_TRUE(parts[2].empty());
  EXPECT_EQ(parts[3][0].name, "gradients of chunk 0");
  EXPECT_TRUE(parts[4].empty());  // it is frozen
  EXPECT_TRUE(parts[5].empty());
  EXPECT_TRUE(StoredWeights::parts_of(model.layout(64), {}).empty());
}

TEST(StoredWeightsPartsTest, FourBuffersAreLeftBesideTheLeases) {
  EXPECT_EQ(StoredWeights::max_leases_in(StoredWeights::kLeastSlots), 1U);
  EXPECT_EQ(StoredWeights::on_nvme({true}, 8).max_leases, 4U);
  EXPECT_TRUE(StoredWeights::on_nvme({true}, 8).writable);
  EXPECT_TRUE(StoredWeights::on_nvme({true}, 8).gradients);
  const ParamStoreSpec ranks = StoredWeights::on_ranks({true, false}, 2);
  EXPECT_EQ(ranks.max_leases, 2U);
  EXPECT_FALSE(ranks.writable);
  EXPECT_FALSE(ranks.gradients);
}

class StoredWeightsTest : public ::testing::Test {
 protected:
  void SetUp() override { make(); }

  void make(std::size_t slots = StoredWeights::kLeastSlots, const std::string& faults = "") {
    store_.reset();
    const ScopedFaults scope(faults);
    store_ = std::make_unique<TestStore>(
        SmallModel::row(kChunks, kChunk / 4).layout(kChunk),
        StoreOptions{.weights_on_nvme = std::vector<bool>(kChunks, true),
                     .weight_slots = slots,
                     .directory = directory_.string()});
  }
  [[nodiscard]] StoredWeights& weights() const { return *store_->weights; }
  [[nodiscard]] ChunkStream::Counts counts() const {
    return store_->nvme->stream(StoragePlan::kWeights)->counts();
  }
  static WeightUse use(std::size_t part, bool writes = false) {
    return {.part = part, .writes = writes};
  }
  [[nodiscard]] std::unique_ptr<StoredWeights::Visit> visit(std::size_t part,
                                                            bool writes = false) const {
    const WeightUse one = use(part, writes);
    return weights().visit(std::span(&one, 1));
  }
  static Bytes contents(std::size_t part) {
    return random_bytes(kChunk, static_cast<unsigned>(part) + 1);
  }
  /// Writes contents of their own to all parts.
  void fill() const {
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      store_->write_weights(param_id(chunk), contents(chunk));
      store_->write_gradient(param_id(chunk), contents(kChunks + chunk));
    }
    store_->nvme->stream(StoragePlan::kWeights)->flush();
  }
  void expect_filled() const {
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_TRUE(store_->read_weights(param_id(chunk)) == contents(chunk));
      EXPECT_TRUE(store_->read_gradient(param_id(chunk)) == contents(kChunks + chunk));
    }
  }

  const test::TempDirectory directory_;
  std::unique_ptr<TestStore> store_;
};

TEST_F(StoredWeightsTest, PayloadsAreInNoMemory) {
  const std::size_t window = 5 * kChunk + kIoAlignment - 1;
  EXPECT_EQ(store_->host->ledger().used(), kChunks * 2 * kChunk + window);  // with the states
  EXPECT_EQ(store_->nvme->used_bytes(), 2 * kChunks * kChunk);
  for (const PayloadKind kind : {PayloadKind::kParam, PayloadKind::kGrad}) {
    const auto& payload = store_->manager->payload(chunk_id(1), kind);
    EXPECT_EQ(payload->data(), nullptr);
    EXPECT_EQ(payload->bytes(), kChunk);
    EXPECT_EQ(payload->tier(), TierKind::kNvme);
  }
  EXPECT_TRUE(weights().stored(chunk_id(1)));
  EXPECT_TRUE(weights().gradients_stored(chunk_id(1)));
  EXPECT_TRUE(store_->states->partly_stored(chunk_id(1)));
  EXPECT_EQ(store_->states->element(param_id(1), PayloadKind::kParam), nullptr);
}

TEST_F(StoredWeightsTest, TheMessageForAMissingAddressSaysWhereTheWeightsAre) {
  EXPECT_NE(weights().no_address().find("are on NVMe"), std::string::npos);
  EXPECT_NE(StoredWeights::on_ranks({}, 1).no_address.find("zero_stage=3"), std::string::npos);
}

TEST_F(StoredWeightsTest, AVisitPointsTheFollowersUntilItEnds) {
  {
    const WeightUse uses[] = {use(1), use(kChunks + 2)};
    const auto visit = weights().visit(uses);
    EXPECT_NE(store_->params.address(chunk_id(1)), nullptr);
    EXPECT_NE(store_->gradients.address(chunk_id(2)), nullptr);
    EXPECT_NE(store_->params.address(chunk_id(1)), store_->gradients.address(chunk_id(2)));
    EXPECT_EQ(store_->params.count(chunk_id(2)), 0U);
  }
  EXPECT_EQ(store_->params.address(chunk_id(1)), nullptr);
  EXPECT_EQ(store_->gradients.address(chunk_id(2)), nullptr);
  EXPECT_EQ(store_->backend->fences().size(), 1U);  // operators are over before
}

TEST_F(StoredWeightsTest, AVisitToNothingIsOne) {
  const auto visit = weights().visit({});
  EXPECT_NE(visit, nullptr);
}

TEST_F(StoredWeightsTest, APartStaysBoundUntilItsLastVisitEnds) {
  auto first = visit(0);
  std::byte* const address = store_->params.address(chunk_id(0));
  const auto second = visit(0);
  EXPECT_EQ(store_->params.address(chunk_id(0)), address);
  first.reset();
  EXPECT_EQ(store_->params.address(chunk_id(0)), address);
}

TEST_F(StoredWeightsTest, ParametersThatMovedToTheDeviceAreNotUnbound) {
  auto visited = visit(0);
  weights().moved_out(chunk_id(0));
  const std::size_t told = store_->params.count(chunk_id(0));
  visited.reset();
  EXPECT_EQ(store_->params.count(chunk_id(0)), told);
}

TEST_F(StoredWeightsTest, WhatAVisitorWritesStays) {
  fill();
  expect_filled();
  {
    const auto visited = visit(1, /*writes=*/true);
    *store_->params.address(chunk_id(1)) ^= std::byte{0xff};
  }
  Bytes expected = contents(1);
  expected[0] ^= std::byte{0xff};
  for (std::size_t part = 0; part < 2 * kChunks; ++part) {  // displaces it
    static_cast<void>(visit(part));
  }
  EXPECT_TRUE(store_->read_weights(param_id(1)) == expected);
}

TEST_F(StoredWeightsTest, AVisitorThatReadsCausesNoWrite) {
  fill();
  const std::uint64_t written = counts().written_bytes;
  expect_filled();
  expect_filled();
  EXPECT_EQ(counts().written_bytes, written);
}

TEST_F(StoredWeightsTest, MorePartsThanBuffersAreRefusedAtOnce) {
  const WeightUse all[] = {use(0), use(1), use(2), use(3), use(4), use(5)};
  expect_out_of_memory([&] { static_cast<void>(weights().visit(all)); }, TierKind::kHost, kChunk, 0,
                       5 * kChunk);
  EXPECT_EQ(store_->params.count(chunk_id(0)), 0U);
  const auto most = weights().visit(std::span(all).first(5));
  EXPECT_NE(store_->params.address(chunk_id(0)), nullptr);
}

TEST_F(StoredWeightsTest, WhoHoldsEveryBufferIsRefusedAnother) {
  const WeightUse most[] = {use(0), use(1), use(2), use(3), use(4)};
  auto visited = weights().visit(most);
  expect_out_of_memory([&] { static_cast<void>(visit(5)); }, TierKind::kHost, kChunk, 0,
                       5 * kChunk);
  expect_out_of_memory(
      [&] {
        static_cast<void>(weights().lease(chunk_id(0)));
        static_cast<void>(visit(5));
      },
      TierKind::kHost, kChunk, 0, 5 * kChunk);
  visited.reset();
  static_cast<void>(visit(5));
  EXPECT_EQ(store_->gradients.count(chunk_id(2)), 2U);
}

TEST_F(StoredWeightsTest, AFailedReadOfAVisitPointsNowhere) {
  for (const char* const fault : {"read:1:EIO", "read:2:flip"}) {
    make(StoredWeights::kLeastSlots, fault);
    fill();
    const WeightUse uses[] = {use(0), use(1), use(2), use(3), use(4), use(5)};
    int failures = 0;
    for (int i = 0; i < 4; ++i) {
      try {
        const auto visited = weights().visit(std::span(uses).subspan(i % 2 * 3, 3));
      } catch (const IoError&) {
        ++failures;
      }
    }
    EXPECT_EQ(failures, 1) << fault;
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(store_->params.address(chunk_id(chunk)), nullptr);
      EXPECT_EQ(store_->gradients.address(chunk_id(chunk)), nullptr);
    }
    EXPECT_FALSE(weights().torn());
    expect_filled();
  }
}

TEST_F(StoredWeightsTest, TheNthReadThatFailsIsTheErrorOfWhoWaitsForIt) {
  for (const int call : {1, 2, 3}) {
    make(StoredWeights::kLeastSlots, "read:" + std::to_string(call) + ":EIO");
    fill();  // leaves the last five parts in the window
    int failures = 0;
    for (const std::size_t part : {0, 1, 2, 3, 4, 5, 0, 1, 2, 3}) {
      try {
        const auto visited = visit(part);
      } catch (const IoError& error) {
        EXPECT_EQ(error.error_number(), EIO);
        ++failures;
      }
    }
    EXPECT_EQ(failures, 1) << call;
    expect_filled();
  }
}

TEST_F(StoredWeightsTest, ALeaseGivesTheParametersAnAddress) {
  fill();
  const auto lease = weights().lease(chunk_id(2));
  lease->wait(ParamAccess::kRead);
  EXPECT_TRUE(std::equal(lease->data(), lease->data() + kChunk, contents(2).begin()));
  EXPECT_EQ(store_->params.address(chunk_id(2)), nullptr);  // nobody is told
}

TEST_F(StoredWeightsTest, ALeaseThatWritesWaitsForCopiesFirst) {
  fill();
  const std::size_t before = store_->backend->written_by_host().size();
  {
    const auto lease = weights().lease(chunk_id(2));
    lease->wait(ParamAccess::kRead);
    EXPECT_EQ(store_->backend->written_by_host().size(), before);
    lease->wait(ParamAccess::kWrite);
    ASSERT_EQ(store_->backend->written_by_host().size(), before + 1);
    EXPECT_EQ(store_->backend->written_by_host().back(), lease->data());
    *lease->data() = std::byte{42};
  }
  EXPECT_EQ(store_->backend->written_by_host().size(), before + 2);  // before the buffer goes
  for (std::size_t part = 0; part < 2 * kChunks; ++part) {
    static_cast<void>(visit(part));
  }
  EXPECT_EQ(store_->read_weights(param_id(2))[0], std::byte{42});
}

TEST_F(StoredWeightsTest, LeasesAndVisitsEndOnALostDeviceToo) {
  auto lease = weights().lease(chunk_id(0));
  lease->wait(ParamAccess::kRead);
  store_->backend->fail_next();
  lease.reset();
  auto visited = visit(0);
  store_->backend->fail_next();
  visited.reset();
  EXPECT_EQ(store_->params.address(chunk_id(0)), nullptr);
}

TEST_F(StoredWeightsTest, EveryBufferLeasedLeavesNoneForAnother) {
  std::vector<std::unique_ptr<ParamLease>> leases;
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    leases.push_back(weights().lease(chunk_id(chunk)));
  }
  const WeightUse two[] = {use(3), use(4)};
  const auto visited = weights().visit(two);
  expect_out_of_memory([&] { static_cast<void>(visit(5)); }, TierKind::kHost, kChunk, 0,
                       5 * kChunk);
}

TEST_F(StoredWeightsTest, AnnouncedChunksAreReadAheadUpToTheLeases) {
  fill();
  for (const std::size_t part : {2, 3, 4, 5, 0, 1, 2, 3, 4, 5}) {  // displaces part 0
    static_cast<void>(visit(part));
  }
  const std::uint64_t before = counts().read_bytes;
  const ChunkId others[] = {chunk_id(1), chunk_id(0)};
  weights().announce(others);  // there is one lease, for chunk 1, which is in the window
  EXPECT_EQ(counts().read_bytes, before);
  weights().announce(store_->chunks());
  EXPECT_EQ(counts().read_bytes, before + kChunk);
  EXPECT_TRUE(store_->read_weights(param_id(0)) == contents(0));
  EXPECT_EQ(counts().read_bytes, before + kChunk);
  weights().forget_announced();
  expect_filled();
}

TEST_F(StoredWeightsTest, AnnouncedUpdatesReadParametersAndGradients) {
  for (const std::size_t absent : {std::size_t{0}, kChunks}) {  // chunk 0's, one or the other
    fill();
    for (int round = 0; round < 2; ++round) {
      for (std::size_t part = 0; part < 2 * kChunks; ++part) {
        if (part != absent) {
          static_cast<void>(visit(part));
        }
      }
    }
    const std::uint64_t before = counts().read_bytes;
    weights().announce_updates(store_->chunks());  // room for one chunk
    EXPECT_EQ(counts().read_bytes, before + kChunk);
    auto pins = weights().pin_for_update(chunk_id(0));
    EXPECT_EQ(counts().read_bytes, before + kChunk);
    ASSERT_EQ(pins.size(), 2U);
    EXPECT_TRUE(std::ranges::equal(pins[0].payloads().front(), contents(0)));
    EXPECT_TRUE(std::ranges::equal(pins[1].payloads().front(), contents(kChunks)));
  }
}

TEST_F(StoredWeightsTest, GradientsAreReadOneChunkAfterTheOther) {
  fill();
  std::vector<ChunkId> seen;
  weights().read_gradients(store_->chunks(), [&](ChunkId chunk, const std::byte* gradients) {
    seen.push_back(chunk);
    EXPECT_TRUE(
        std::equal(gradients, gradients + kChunk, contents(kChunks + index(chunk)).begin()));
  });
  EXPECT_EQ(seen, store_->chunks());
  weights().read_gradients({}, [](ChunkId, const std::byte*) { ADD_FAILURE(); });
}

TEST_F(StoredWeightsTest, DiscardedGradientsAreZeros) {
  fill();
  weights().discard_gradients(chunk_id(1));
  EXPECT_EQ(store_->read_gradient(param_id(1)), Bytes(kChunk));
  EXPECT_TRUE(store_->read_gradient(param_id(0)) == contents(kChunks));
  EXPECT_TRUE(store_->read_weights(param_id(1)) == contents(1));
}

TEST_F(StoredWeightsTest, DiscardedParametersLeaveTheGradients) {
  fill();
  weights().discard_parameters();
  EXPECT_EQ(store_->read_weights(param_id(1)), Bytes(kChunk));
  EXPECT_TRUE(store_->read_gradient(param_id(1)) == contents(kChunks + 1));
}

TEST_F(StoredWeightsTest, DiscardedParametersHealATornStore) {
  make(StoredWeights::kLeastSlots, "write:4:EIO");
  EXPECT_THROW(fill(), IoError);
  EXPECT_TRUE(weights().torn());
  weights().discard_parameters();
  EXPECT_FALSE(weights().torn());
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    EXPECT_EQ(store_->read_weights(param_id(chunk)), Bytes(kChunk));
    EXPECT_EQ(store_->read_gradient(param_id(chunk)), Bytes(kChunk));
  }
  fill();
  expect_filled();
}

TEST_F(StoredWeightsTest, AnUpdateWaitsForCopiesOfTheParameters) {
  const std::size_t before = store_->backend->written_by_host().size();
  const auto pins = weights().pin_for_update(chunk_id(1));
  ASSERT_EQ(store_->backend->written_by_host().size(), before + 1);
  EXPECT_EQ(store_->backend->written_by_host().back(), pins[0].payloads().front().data());
}

TEST_F(StoredWeightsTest, ThreadsVisitPartsOfTheirOwn) {
  constexpr int kRounds = 30;
  {
    std::vector<std::jthread> threads;
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      threads.emplace_back([this, chunk] {
        for (int round = 0; round < kRounds; ++round) {
          const auto visited = visit(chunk, /*writes=*/true);
          std::byte* const first = store_->params.address(chunk_id(chunk));
          for (std::size_t i = 0; i < kChunk; ++i) {
            first[i] = static_cast<std::byte>(static_cast<std::size_t>(first[i]) + chunk + 1);
          }
        }
      });
    }
  }
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    EXPECT_EQ(store_->read_weights(param_id(chunk)),
              Bytes(kChunk, static_cast<std::byte>(kRounds * (chunk + 1))));
  }
}

TEST_F(StoredWeightsTest, SomeChunksMayStayInMemory) {
  store_.reset();
  store_ = std::make_unique<TestStore>(
      SmallModel::row(kChunks, kChunk / 4).layout(kChunk),
      StoreOptions{.weights_on_nvme = {false, true, false}, .directory = directory_.string()});
  EXPECT_FALSE(weights().stored(chunk_id(0)));
  EXPECT_FALSE(store_->states->partly_stored(chunk_id(0)));
  fill();
  expect_filled();
  EXPECT_EQ(store_->params.count(chunk_id(0)), 0U);
}

TEST_F(StoredWeightsTest, OperatorsMayChangeWeightsOnNvmeButNotShards) {
  weights().check_writable(chunk_id(0));
  const RecordingFollower follower;
  StoredWeights shards(StoredWeights::on_ranks({true, false, false}, 1), follower, follower,
                       *store_->nvme->stream(StoragePlan::kWeights), store_->device);
  EXPECT_THROW(shards.check_writable(chunk_id(0)), UsageError);
  shards.check_writable(chunk_id(1));
  EXPECT_FALSE(shards.gradients_stored(chunk_id(0)));
  const auto lease = shards.lease(chunk_id(0));
  lease->wait(ParamAccess::kRead);
  expect_thrown<UsageError>([&] { lease->wait(ParamAccess::kWrite); },
                            "change in optimizer.step() and in loads alone");
}

}  // namespace
}  // namespace castor::testing
