// Gradients of three chunks of 128 bytes, of which two ranks keep halves. The ranks are objects on
// one thread; threads of WeightShards answer for them.

#include "store/gradient_shards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "core/fakes.h"
#include "core/thread_messages.h"
#include "store/errors.h"
#include "store/recording_follower.h"
#include "store/small_model.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;
using Access = GradientShards::Access;
using Contents = GradientShards::Contents;

constexpr std::size_t kChunk = 128;
constexpr std::size_t kRanks = 2;
constexpr std::size_t kShard = kChunk / kRanks;

ChunkLayout layout_of_chunks() {
  SmallModel model = SmallModel::row(3, kChunk / 4);
  model.add(kChunk / 4, ScalarType::kFloat32, /*trainable=*/false);
  return model.layout(kChunk, nullptr, kRanks);
}

/// The sharded gradients of one rank.
struct Rank {
  Rank(ThreadMessages& messages, std::size_t rank, std::size_t host_bytes)
      : host(std::make_shared<MemoryTier>(TierKind::kHost, host_bytes,
                                          std::make_unique<HeapArena>(blocks))) {
    std::vector<std::span<std::byte>> kept(2 * layout.chunks().size());
    for (std::size_t i = 0; i < 3; ++i) {
      kept[layout.chunks().size() + i] = std::span(memory).subspan(i * kShard, kShard);
    }
    shards =
        std::make_unique<WeightShards>(messages.of_rank(rank), std::move(kept),
                                       layout.chunks().size(), 1, std::chrono::milliseconds(0));
    gradients = std::make_unique<GradientShards>(layout, *shards, host, 0, follower);
  }

  /// Reduces the chunk to bytes that say of which rank they are.
  void reduce(ChunkId chunk, int value) const {
    gradients->reduce(chunk, [&](std::span<const std::byte> copy, std::span<std::byte> shard) {
      EXPECT_EQ(copy.size(), kChunk);
      std::ranges::fill(shard, static_cast<std::byte>(value + static_cast<int>(shards->rank())));
    });
  }
  [[nodiscard]] Bytes read(ChunkId chunk) const {
    const auto visit = gradients->visit(chunk, Access::kRead);
    const std::byte* const first = follower.address(chunk);
    return {first, first + kChunk};
  }

  const ChunkLayout layout = layout_of_chunks();
  const std::shared_ptr<LiveBlocks> blocks = std::make_shared<LiveBlocks>();
  Bytes memory = Bytes(3 * kShard);
  std::shared_ptr<MemoryTier> host;
  RecordingFollower follower;
  std::unique_ptr<WeightShards> shards;
  std::unique_ptr<GradientShards> gradients;
};

class GradientShardsTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::size_t used() const { return first_.host->ledger().used(); }
  /// Both ranks have a mean of `value` and value + 1.
  void reduce_both(ChunkId chunk, int value) const {
    for (const Rank* const rank : {&first_, &second_}) {
      rank->gradients->take_copy(chunk, Contents::kZeros);
    }
    for (const Rank* const rank : {&first_, &second_}) {
      rank->reduce(chunk, value);
    }
  }
  static Bytes mean(int value) {
    Bytes bytes(kChunk, static_cast<std::byte>(value));
    std::fill(bytes.begin() + kShard, bytes.end(), static_cast<std::byte>(value + 1));
    return bytes;
  }

  ThreadMessages messages_{kRanks};
  Rank first_{messages_, 0, 1024};
  Rank second_{messages_, 1, 1024};
  GradientShards& gradients_ = *first_.gradients;
};

TEST_F(GradientShardsTest, TrainableChunksAreSharded) {
  EXPECT_TRUE(gradients_.sharded(chunk_id(0)));
  EXPECT_FALSE(gradients_.sharded(chunk_id(3)));
  EXPECT_EQ(gradients_.shard_bytes(), 3 * kShard);
  EXPECT_EQ(gradients_.copy_bytes(), 0U);
  EXPECT_EQ(used(), 0U);
}

TEST_F(GradientShardsTest, ACopyIsZerosBeforeTheFirstMean) {
  for (const Contents contents : {Contents::kZeros, Contents::kMean}) {
    const ChunkId chunk = chunk_id(contents == Contents::kMean ? 1 : 0);
    gradients_.take_copy(chunk, contents);
    EXPECT_EQ(Bytes(gradients_.copy(chunk), gradients_.copy(chunk) + kChunk), Bytes(kChunk));
  }
  EXPECT_EQ(first_.shards->bytes_read(), 0U);  // nobody is asked
}

TEST_F(GradientShardsTest, TheHostPaysForCopiesWhileTheyExist) {
  gradients_.take_copy(chunk_id(0), Contents::kZeros);
  gradients_.take_copy(chunk_id(1), Contents::kZeros);
  EXPECT_EQ(used(), 2 * kChunk);
  EXPECT_EQ(gradients_.copy_bytes(), 2 * kChunk);
  gradients_.drop_copy(chunk_id(0));
  gradients_.drop_copy(chunk_id(0));  // there is none
  EXPECT_EQ(used(), kChunk);
  EXPECT_EQ(gradients_.copy_bytes(), kChunk);
  EXPECT_EQ(gradients_.peak_copy_bytes(), 2 * kChunk);
}

TEST_F(GradientShardsTest, ACopyThatIsThereStaysWhereItIs) {
  gradients_.take_copy(chunk_id(0), Contents::kZeros);
  std::byte* const address = gradients_.copy(chunk_id(0));
  *address = std::byte{5};
  gradients_.take_copy(chunk_id(0), Contents::kZeros);
  EXPECT_EQ(gradients_.copy(chunk_id(0)), address);
  EXPECT_EQ(*address, std::byte{5});
  EXPECT_TRUE(gradients_.has_copy(chunk_id(0)));
  EXPECT_EQ(first_.follower.count(chunk_id(0)), 0U);  // no operator is told
}

TEST_F(GradientShardsTest, CopiesFitTheBudgetExactlyOrAreRefused) {
  ThreadMessages messages(1);
  SmallModel model = SmallModel::row(2, kChunk / 4);
  const ChunkLayout layout = model.layout(kChunk);
  Bytes memory(2 * kChunk);
  WeightShards shards(messages.of_rank(0),
                      {{}, {}, std::span(memory).first(kChunk), std::span(memory).last(kChunk)}, 2,
                      1, std::chrono::milliseconds(0));
  const auto host = std::make_shared<MemoryTier>(
      TierKind::kHost, 2 * kChunk - 1, std::make_unique<HeapArena>(std::make_shared<LiveBlocks>()));
  const RecordingFollower follower;
  GradientShards gradients(layout, shards, host, 0, follower);
  gradients.take_copy(chunk_id(0), Contents::kZeros);
  expect_out_of_memory([&] { gradients.take_copy(chunk_id(1), Contents::kZeros); }, TierKind::kHost,
                       kChunk, kChunk - 1, 2 * kChunk - 1);
  expect_out_of_memory([&] { static_cast<void>(gradients.visit(chunk_id(1), Access::kRead)); },
                       TierKind::kHost, kChunk, kChunk - 1, 2 * kChunk - 1);
  EXPECT_FALSE(gradients.has_copy(chunk_id(1)));
  EXPECT_EQ(follower.address(chunk_id(1)), nullptr);
  gradients.drop_copy(chunk_id(0));
  gradients.take_copy(chunk_id(1), Contents::kZeros);
  EXPECT_EQ(host->ledger().used(), kChunk);
}

TEST_F(GradientShardsTest, AVisitPointsTheFollowerUntilItEnds) {
  auto first = gradients_.visit(chunk_id(1), Access::kRead);
  std::byte* const address = first_.follower.address(chunk_id(1));
  EXPECT_EQ(address, gradients_.copy(chunk_id(1)));
  auto second = gradients_.visit(chunk_id(1), Access::kRead);
  first.reset();
  EXPECT_EQ(first_.follower.address(chunk_id(1)), address);
  second.reset();
  EXPECT_EQ(first_.follower.address(chunk_id(1)), nullptr);
  EXPECT_FALSE(gradients_.has_copy(chunk_id(1)));
}

TEST_F(GradientShardsTest, ACopyThatWasReadStaysForTheNextReaderOfItsChunk) {
  reduce_both(chunk_id(0), 10);
  static_cast<void>(first_.read(chunk_id(0)));
  const std::uint64_t read = first_.shards->bytes_read();
  EXPECT_EQ(gradients_.copy_bytes(), kChunk);
  EXPECT_EQ(first_.read(chunk_id(0)), mean(10));
  EXPECT_EQ(first_.shards->bytes_read(), read);
  static_cast<void>(first_.read(chunk_id(1)));
  EXPECT_EQ(gradients_.copy_bytes(), kChunk);  // that of chunk 0 has gone
  EXPECT_EQ(gradients_.copy(chunk_id(0)), nullptr);
}

TEST_F(GradientShardsTest, ACopyThatWasReadMakesRoomForOneThatStays) {
  static_cast<void>(first_.read(chunk_id(0)));
  gradients_.take_copy(chunk_id(1), Contents::kZeros);
  EXPECT_EQ(used(), kChunk);
  EXPECT_EQ(gradients_.peak_copy_bytes(), kChunk);
}

TEST_F(GradientShardsTest, ACopyThatWasWrittenStaysWhenAnotherChunkIsRead) {
  static_cast<void>(gradients_.visit(chunk_id(0), Access::kWrite));
  EXPECT_TRUE(gradients_.has_copy(chunk_id(0)));
  static_cast<void>(first_.read(chunk_id(1)));
  static_cast<void>(first_.read(chunk_id(2)));
  EXPECT_EQ(gradients_.copy_bytes(), 2 * kChunk);
  EXPECT_TRUE(gradients_.has_copy(chunk_id(0)));
}

TEST_F(GradientShardsTest, AVisitedCopyStaysWhenAnotherChunkIsRead) {
  const auto visit = gradients_.visit(chunk_id(0), Access::kRead);
  static_cast<void>(first_.read(chunk_id(1)));
  static_cast<void>(first_.read(chunk_id(2)));
  EXPECT_EQ(first_.follower.address(chunk_id(0)), gradients_.copy(chunk_id(0)));
  EXPECT_EQ(gradients_.copy_bytes(), 2 * kChunk);
}

TEST_F(GradientShardsTest, AReductionLeavesEachRankItsShardOfTheMean) {
  reduce_both(chunk_id(1), 20);
  EXPECT_EQ(used(), 0U);
  EXPECT_FALSE(gradients_.has_copy(chunk_id(1)));
  EXPECT_EQ(Bytes(gradients_.shard(chunk_id(1)), gradients_.shard(chunk_id(1)) + kShard),
            Bytes(kShard, std::byte{20}));
  EXPECT_EQ(first_.read(chunk_id(1)), mean(20));
  EXPECT_EQ(second_.read(chunk_id(1)), mean(20));
  EXPECT_EQ(first_.shards->bytes_read(), kShard);
}

TEST_F(GradientShardsTest, EveryReductionReplacesTheMean) {
  for (const int value : {20, 40, 60}) {
    reduce_both(chunk_id(1), value);
    EXPECT_EQ(second_.read(chunk_id(1)), mean(value));
    second_.gradients->drop_copy(chunk_id(1));
  }
}

TEST_F(GradientShardsTest, AReductionThatFailsLeavesTheCopy) {
  gradients_.take_copy(chunk_id(0), Contents::kZeros);
  *gradients_.copy(chunk_id(0)) = std::byte{7};
  EXPECT_THROW(
      gradients_.reduce(chunk_id(0), [](std::span<const std::byte>,
                                        std::span<std::byte>) { throw InjectedFailure("reduce"); }),
      InjectedFailure);
  EXPECT_TRUE(gradients_.has_copy(chunk_id(0)));
  EXPECT_EQ(*gradients_.copy(chunk_id(0)), std::byte{7});
  EXPECT_EQ(used(), kChunk);
  gradients_.drop_copy(chunk_id(0));  // nobody waits for the reduction
  EXPECT_EQ(used(), 0U);
}

TEST_F(GradientShardsTest, TheShardIsThatOfAWrittenCopyElseOfTheMean) {
  reduce_both(chunk_id(0), 30);
  std::byte* const of_mean = second_.gradients->shard(chunk_id(0));
  EXPECT_EQ(*of_mean, std::byte{31});
  static_cast<void>(second_.read(chunk_id(0)));
  EXPECT_EQ(second_.gradients->shard(chunk_id(0)), of_mean);  // it was only read
  static_cast<void>(second_.gradients->visit(chunk_id(0), Access::kWrite));
  EXPECT_EQ(second_.gradients->shard(chunk_id(0)), second_.gradients->copy(chunk_id(0)) + kShard);
  second_.gradients->drop_copy(chunk_id(0));
  EXPECT_EQ(second_.gradients->shard(chunk_id(0)), of_mean);
}

TEST_F(GradientShardsTest, WhoWritesBeginsWithTheMean) {
  reduce_both(chunk_id(0), 50);
  {
    const auto visit = gradients_.visit(chunk_id(0), Access::kWrite);
    std::byte* const first = first_.follower.address(chunk_id(0));
    EXPECT_EQ(Bytes(first, first + kChunk), mean(50));
    first[3] = std::byte{1};
  }
  EXPECT_EQ(first_.read(chunk_id(0))[3], std::byte{1});
  EXPECT_EQ(second_.read(chunk_id(0)), mean(50));  // the others see nothing of it
  gradients_.drop_copy(chunk_id(0));
  EXPECT_EQ(first_.read(chunk_id(0)), mean(50));
}

TEST_F(GradientShardsTest, ACopyToAccumulateIntoMayBeginWithTheMean) {
  reduce_both(chunk_id(2), 70);
  gradients_.take_copy(chunk_id(2), Contents::kMean);
  EXPECT_EQ(Bytes(gradients_.copy(chunk_id(2)), gradients_.copy(chunk_id(2)) + kChunk), mean(70));
  EXPECT_TRUE(gradients_.has_copy(chunk_id(2)));
  gradients_.drop_copy(chunk_id(2));
  gradients_.take_copy(chunk_id(2), Contents::kZeros);
  EXPECT_EQ(Bytes(gradients_.copy(chunk_id(2)), gradients_.copy(chunk_id(2)) + kChunk),
            Bytes(kChunk));
}

TEST_F(GradientShardsTest, AReductionWaitsForReaders) {
  gradients_.take_copy(chunk_id(0), Contents::kZeros);
  auto visit = gradients_.visit(chunk_id(0), Access::kRead);
  std::atomic<bool> visited = true;
  std::thread reducing([&] {
    gradients_.reduce(chunk_id(0), [&](std::span<const std::byte>, std::span<std::byte> shard) {
      EXPECT_FALSE(visited);
      std::ranges::fill(shard, std::byte{1});
    });
  });
  visited = false;
  visit.reset();
  reducing.join();
  EXPECT_EQ(used(), 0U);
}

TEST_F(GradientShardsTest, DroppingWaitsForReaders) {
  gradients_.take_copy(chunk_id(0), Contents::kZeros);
  auto visit = gradients_.visit(chunk_id(0), Access::kRead);
  std::thread dropping([&] { gradients_.drop_copy(chunk_id(0)); });
  EXPECT_NE(gradients_.copy(chunk_id(0)), nullptr);
  visit.reset();
  dropping.join();
  EXPECT_EQ(gradients_.copy(chunk_id(0)), nullptr);
}

TEST_F(GradientShardsTest, AReaderWaitsForAReductionAndSeesItsMean) {
  reduce_both(chunk_id(0), 1);
  for (const Rank* const rank : {&first_, &second_}) {
    rank->gradients->take_copy(chunk_id(0), Contents::kZeros);
  }
  std::atomic<bool> reading = false;
  std::thread reader;
  gradients_.reduce(chunk_id(0), [&](std::span<const std::byte>, std::span<std::byte> shard) {
    reader = std::thread([&] {
      reading = true;
      reading.notify_one();
      EXPECT_EQ(first_.read(chunk_id(0)), mean(90));
    });
    reading.wait(false);
    std::ranges::fill(shard, std::byte{90});
  });
  second_.reduce(chunk_id(0), 90);
  reader.join();
}

TEST_F(GradientShardsTest, ThreadsThatReadOneChunkShareOneCopy) {
  reduce_both(chunk_id(0), 5);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] { EXPECT_EQ(first_.read(chunk_id(0)), mean(5)); });
    }
  }
  EXPECT_EQ(gradients_.peak_copy_bytes(), kChunk);
  EXPECT_EQ(first_.shards->bytes_read(), kShard);
}

TEST_F(GradientShardsTest, ALostRankIsTheErrorOfWhoReads) {
  reduce_both(chunk_id(0), 5);
  messages_.kill(1);
  expect_thrown<Error>([&] { static_cast<void>(gradients_.visit(chunk_id(0), Access::kRead)); },
                       "lost the part of the gradients that rank 1 keeps");
  EXPECT_EQ(used(), 0U);
  EXPECT_EQ(first_.blocks->count(), 0U);
  EXPECT_EQ(first_.follower.address(chunk_id(0)), nullptr);
  gradients_.take_copy(chunk_id(0), Contents::kZeros);  // needs nobody
  EXPECT_EQ(used(), kChunk);
}

TEST_F(GradientShardsTest, AtTheEndNothingPointsToACopy) {
  gradients_.take_copy(chunk_id(0), Contents::kZeros);
  first_.gradients.reset();
  EXPECT_EQ(used(), 0U);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(first_.follower.address(chunk_id(i)), nullptr);
    EXPECT_EQ(first_.follower.count(chunk_id(i)), 1U);
  }
}

TEST_F(GradientShardsTest, TheMessageForAMissingAddressNamesTheStage) {
  EXPECT_NE(GradientShards::no_address().find("zero_stage=2 or 3"), std::string::npos);
}

TEST_F(GradientShardsTest, ThreadsVisitAndTakeCopiesWithoutLosingAByte) {
  for (std::size_t chunk = 0; chunk < 3; ++chunk) {
    reduce_both(chunk_id(chunk), static_cast<int>(10 * chunk));
  }
  {
    std::vector<std::jthread> threads;
    for (unsigned thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::minstd_rand random(thread + 1);
        for (int i = 0; i < 60; ++i) {
          const std::size_t chunk = random() % 3;
          const auto visit = gradients_.visit(chunk_id(chunk), Access::kRead);
          const std::byte* const first = gradients_.copy(chunk_id(chunk));
          EXPECT_EQ(Bytes(first, first + kChunk), mean(static_cast<int>(10 * chunk)));
        }
      });
    }
  }
  EXPECT_EQ(used(), gradients_.copy_bytes());
  EXPECT_LE(gradients_.copy_bytes(), kChunk);  // at most the one for the next reader
  EXPECT_LE(gradients_.peak_copy_bytes(), 3 * kChunk);
}

}  // namespace
}  // namespace castor::testing
