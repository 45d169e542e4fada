// Copies of chunks of 64 elements in fp32, each with two states: 768 bytes with them, 256 without.

#include "store/chunk_copies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <thread>
#include <vector>

#include "core/random_bytes.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kNumel = 64;
constexpr std::size_t kChunk = 4 * kNumel;
constexpr std::size_t kWithStates = 3 * kChunk;
constexpr std::size_t kChunks = 4;
constexpr std::size_t kMuch = std::size_t{1} << 20;

class ChunkCopiesTest : public ::testing::Test {
 protected:
  void SetUp() override { make({}); }

  void make(StoreOptions options) {
    store_.reset();
    options.directory = directory_.string();
    store_ = std::make_unique<TestStore>(SmallModel::row(kChunks, kNumel).layout(kChunk),
                                         std::move(options));
    fill(1);
    in_use_ = store_->host->ledger().used();
  }
  static Bytes values(std::size_t chunk, std::size_t kind, unsigned seed) {
    return random_bytes(kChunk, static_cast<unsigned>(100 * seed + 10 * chunk + kind));
  }
  void fill(unsigned seed) const {
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      store_->write_weights(param_id(chunk), values(chunk, 0, seed));
      for (std::size_t state = 0; state < 2; ++state) {
        store_->write_state(param_id(chunk), rule_payload(state), values(chunk, state + 1, seed));
      }
    }
  }
  std::size_t begin(bool states = true, std::size_t most = kMuch) const {
    store_->reads.begin();
    return copies().begin(store_->chunks(), states, most);
  }
  [[nodiscard]] ChunkCopies& copies() const { return *store_->copies; }
  [[nodiscard]] Bytes piece(std::size_t param, PayloadKind kind) const {
    const ChunkCopies::Bytes bytes = copies().piece(param_id(param), kind);
    return {bytes.data.get(), bytes.data.get() + bytes.size};
  }
  /// Bytes of the host that the copies take.
  [[nodiscard]] std::size_t taken() const { return store_->host->ledger().used() - in_use_; }

  const test::TempDirectory directory_;
  std::unique_ptr<TestStore> store_;
  std::size_t in_use_ = 0;
};

TEST_F(ChunkCopiesTest, WeightsAndStatesAreThoseOfTheBeginning) {
  EXPECT_EQ(begin(), kChunks * kWithStates);
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    EXPECT_TRUE(copies().finish(chunk_id(chunk)));
  }
  fill(2);
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    EXPECT_EQ(piece(chunk, PayloadKind::kParam), values(chunk, 0, 1));
    EXPECT_EQ(piece(chunk, rule_payload(0)), values(chunk, 1, 1));
    EXPECT_EQ(piece(chunk, rule_payload(1)), values(chunk, 2, 1));
  }
  copies().end();
}

TEST_F(ChunkCopiesTest, TheHostPaysUntilTheEnd) {
  EXPECT_EQ(taken(), 0U);
  EXPECT_EQ(begin(), kChunks * kWithStates);
  EXPECT_EQ(taken(), kChunks * kWithStates);
  copies().end();
  EXPECT_EQ(taken(), 0U);
  EXPECT_FALSE(store_->reads.reading());
  EXPECT_FALSE(copies().has(chunk_id(0)));
}

TEST_F(ChunkCopiesTest, WithoutStatesWeightsAloneAreCopied) {
  EXPECT_EQ(begin(/*states=*/false), kChunks * kChunk);
  EXPECT_TRUE(copies().finish(chunk_id(0)));
  EXPECT_EQ(piece(0, PayloadKind::kParam), values(0, 0, 1));
  EXPECT_THROW(static_cast<void>(piece(0, rule_payload(0))), std::bad_optional_access);
  copies().end();
}

TEST_F(ChunkCopiesTest, AsManyChunksAreCopiedAsFit) {
  struct Case {
    std::size_t most;
    std::size_t copied;
  };
  for (const Case one : {Case{0, 0}, Case{kWithStates - 1, 0}, Case{kWithStates, 1},
                         Case{2 * kWithStates - 1, 1}, Case{2 * kWithStates, 2}}) {
    EXPECT_EQ(begin(true, one.most), one.copied * kWithStates);
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(copies().has(chunk_id(chunk)), chunk < one.copied);
      EXPECT_EQ(copies().finish(chunk_id(chunk)), chunk < one.copied);
    }
    EXPECT_EQ(copies().any_awaited(), one.copied < kChunks);
    copies().end();
  }
}

TEST_F(ChunkCopiesTest, CopiesTakeHalfOfWhatTheHostHasLeft) {
  const std::size_t used = kChunks * 4 * kChunk;  // with gradients
  make({.host_bytes = used + 2 * (2 * kWithStates) + 1});
  EXPECT_EQ(begin(), 2 * kWithStates);
  EXPECT_FALSE(copies().has(chunk_id(2)));
  copies().end();
  make({.host_bytes = used});
  EXPECT_EQ(begin(), 0U);
  EXPECT_EQ(taken(), 0U);
  copies().end();
}

TEST_F(ChunkCopiesTest, ASmallChunkIsCopiedBehindOneThatHasNoRoom) {
  SmallModel model;
  model.add(4 * kNumel).add(16, ScalarType::kBFloat16);
  TestStore store(model.layout(4 * kChunk), {});
  store.reads.begin();
  const std::size_t small = 64 + 3 * 64;  // the master and two moments, aligned
  ASSERT_EQ(store.layout.chunk(chunk_id(1)).used_bytes, 64U);
  EXPECT_EQ(store.copies->begin(store.chunks(), true, small + 3 * 64), 64U + 3 * 128);
  EXPECT_FALSE(store.copies->has(chunk_id(0)));
  EXPECT_TRUE(store.copies->has(chunk_id(1)));
  store.copies->end();
}

TEST_F(ChunkCopiesTest, NoChunksTakeNothing) {
  store_->reads.begin();
  EXPECT_EQ(copies().begin({}, true, kMuch), 0U);
  EXPECT_FALSE(copies().finish(chunk_id(0)));
  copies().end();
}

TEST_F(ChunkCopiesTest, ChunksOnNvmeInPartAreReadInPlace) {
  make({.states_on_nvme = {true, false, false, false},
        .weights_on_nvme = {false, true, false, false}});
  EXPECT_EQ(begin(), 2 * kWithStates);
  EXPECT_FALSE(copies().has(chunk_id(0)));
  EXPECT_FALSE(copies().has(chunk_id(1)));
  EXPECT_TRUE(copies().has(chunk_id(2)));
  EXPECT_TRUE(copies().any_awaited());
  store_->reads.end(chunk_id(0));
  EXPECT_TRUE(copies().any_awaited());
  store_->reads.end(chunk_id(1));
  EXPECT_FALSE(copies().any_awaited());
  copies().end();
}

TEST_F(ChunkCopiesTest, ChunksOnTheDeviceAreCopiedAtOnce) {
  make({.placements = {Placement::kDevice}, .device = Computes::kByItself});
  const std::size_t before = store_->backend->bytes_copied_from();
  begin();
  EXPECT_EQ(store_->backend->bytes_copied_from() - before, kWithStates);
  fill(2);
  EXPECT_TRUE(copies().finish(chunk_id(0)));
  EXPECT_EQ(piece(0, PayloadKind::kParam), values(0, 0, 1));
  EXPECT_EQ(piece(0, rule_payload(1)), values(0, 2, 1));
  copies().end();
}

TEST_F(ChunkCopiesTest, NobodyWaitsForChunksWhenAllAreFinished) {
  begin(true, 3 * kWithStates);
  copies().finish_all();
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    EXPECT_EQ(store_->reads.reading(chunk_id(chunk)), chunk == 3) << chunk;
  }
  EXPECT_EQ(piece(2, PayloadKind::kParam), values(2, 0, 1));
  copies().end();
}

TEST_F(ChunkCopiesTest, AWriterCopiesTheChunkForItsReader) {
  begin();
  EXPECT_TRUE(store_->reads.let_go(chunk_id(1)));
  EXPECT_FALSE(store_->reads.reading(chunk_id(1)));
  store_->write_weights(param_id(1), values(1, 0, 2));
  EXPECT_EQ(piece(1, PayloadKind::kParam), values(1, 0, 1));
  copies().end();
  EXPECT_TRUE(store_->reads.let_go(chunk_id(1)));
}

TEST_F(ChunkCopiesTest, FinishingTwiceCopiesOnce) {
  begin();
  EXPECT_TRUE(copies().finish(chunk_id(1)));
  store_->write_weights(param_id(1), values(1, 0, 2));
  EXPECT_TRUE(copies().finish(chunk_id(1)));
  EXPECT_EQ(piece(1, PayloadKind::kParam), values(1, 0, 1));
  copies().end();
  EXPECT_FALSE(copies().finish(chunk_id(1)));
}

TEST_F(ChunkCopiesTest, TheNextSaveHasTheNextValues) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    fill(seed);
    EXPECT_EQ(begin(seed != 2), kChunks * (seed == 2 ? kChunk : kWithStates));
    EXPECT_TRUE(copies().finish(chunk_id(3)));
    EXPECT_EQ(piece(3, PayloadKind::kParam), values(3, 0, seed));
    copies().end();
  }
}

TEST_F(ChunkCopiesTest, BytesOutliveTheStore) {
  begin();
  EXPECT_TRUE(copies().finish(chunk_id(3)));
  const ChunkCopies::Bytes bytes = copies().piece(param_id(3), PayloadKind::kParam);
  store_.reset();
  EXPECT_EQ(Bytes(bytes.data.get(), bytes.data.get() + bytes.size), values(3, 0, 1));
}

TEST_F(ChunkCopiesTest, ASecondSaveBesideTheFirstIsRefused) {
  begin();
  EXPECT_THROW(store_->reads.begin(), UsageError);
  copies().end();
  begin();
  copies().end();
}

TEST_F(ChunkCopiesTest, OneRanksShardsAreCopied) {
  SmallModel model;
  model.add(48).add(16);  // together a chunk of 64 elements, halved at element 32
  const ChunkLayout layout = model.layout(kChunk, nullptr, /*ranks=*/2);
  TestStore store(layout, {});
  const Bytes first = random_bytes(4 * 48, 1);
  const Bytes second = random_bytes(64, 2);
  store.write_weights(param_id(0), first);
  store.write_weights(param_id(1), second);
  store.reads.begin();
  EXPECT_EQ(store.copies->begin(store.chunks(), true, kMuch), 3 * kChunk / 2);
  EXPECT_TRUE(store.copies->finish(chunk_id(0)));
  const ChunkCopies::Bytes piece = store.copies->piece(param_id(0), PayloadKind::kParam);
  EXPECT_EQ(Bytes(piece.data.get(), piece.data.get() + piece.size),
            Bytes(first.begin(), first.begin() + 128));
  EXPECT_EQ(store.copies->piece(param_id(1), PayloadKind::kParam).size, 0U);
  store.copies->end();
}

TEST_F(ChunkCopiesTest, ThreadsFinishCopiesTogether) {
  SmallModel model;
  model.add(3 * (std::size_t{1} << 20) / 4 + 100);  // several pieces of a PiecewiseCopy
  TestStore store(model.layout(4 * (std::size_t{1} << 20)), {.num_threads = 2});
  const Bytes values = random_bytes(store.bytes(param_id(0)), 5);
  store.write_weights(param_id(0), values);
  store.reads.begin();
  EXPECT_GT(store.copies->begin(store.chunks(), true, std::size_t{1} << 26), values.size());
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] { EXPECT_TRUE(store.copies->finish(chunk_id(0))); });
    }
  }
  const ChunkCopies::Bytes piece = store.copies->piece(param_id(0), PayloadKind::kParam);
  EXPECT_TRUE(std::equal(values.begin(), values.end(), piece.data.get()));
  store.copies->end();
}

}  // namespace
}  // namespace castor::testing
