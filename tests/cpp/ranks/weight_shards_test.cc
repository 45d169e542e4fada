#include "ranks/weight_shards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "io/chunk_stream.h"
#include "parallel/thread_executor.h"

namespace castor {
namespace {

constexpr std::size_t kShardBytes = 64;
constexpr std::size_t kChunks = 5;

/// One rank's parts: bytes say of which rank, chunk and version they are.
class Rank {
 public:
  explicit Rank(std::shared_ptr<RankMessages> messages, std::size_t not_cut = kChunks,
                std::chrono::milliseconds patience = std::chrono::milliseconds(0),
                std::size_t copies = 1)
      : rank_(messages->rank()), size_(messages->size()) {
    std::vector<std::span<std::byte>> kept;
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      std::vector<std::byte>& memory = memory_.emplace_back();
      for (std::size_t rank = rank_ % (size_ / copies); rank < size_; rank += size_ / copies) {
        memory.insert(memory.end(), kShardBytes, value(rank, chunk, 0));
      }
      kept.push_back(std::span(memory).first(chunk == not_cut ? 0 : memory.size()));
    }
    const std::size_t num_weights = kept.size();
    shards_ = std::make_unique<WeightShards>(std::move(messages), std::move(kept), num_weights,
                                             copies, patience);
  }

  [[nodiscard]] static std::byte value(std::size_t rank, std::size_t chunk, std::size_t version) {
    return static_cast<std::byte>(1 + rank + 7 * chunk + 41 * version);
  }
  [[nodiscard]] WeightShards& shards() { return *shards_; }
  void update(std::size_t chunk, std::size_t version) {
    const ChunkId id{static_cast<std::uint32_t>(chunk)};
    std::memset(shards_->shard(id).data(), std::to_integer<int>(value(rank_, chunk, version)),
                kShardBytes);
    shards_->end_update(id);
  }
  [[nodiscard]] std::vector<std::byte> read(std::size_t chunk) {
    std::vector<std::byte> whole(size_ * kShardBytes);
    shards_->start_read(chunk, whole).wait();
    return whole;
  }
  [[nodiscard]] std::vector<std::byte> expected(std::size_t chunk, std::size_t version) const {
    std::vector<std::byte> whole;
    for (std::size_t rank = 0; rank < size_; ++rank) {
      whole.insert(whole.end(), kShardBytes, value(rank, chunk, version));
    }
    return whole;
  }
  /// A window of two slots on the chunks.
  [[nodiscard]] std::unique_ptr<ChunkStream> window() {
    window_.resize(ChunkStream::memory_bytes(size_ * kShardBytes, 2, 64));
    std::vector<StoredChunk> chunks(kChunks);
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      chunks[chunk].emplace_back(*shards_, chunk, "chunk", size_ * kShardBytes);
    }
    return std::make_unique<ChunkStream>(std::move(chunks), executor_, window_, 64, 2);
  }

 private:
  const std::size_t rank_;
  const std::size_t size_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte> window_;
  ThreadExecutor executor_{1};
  std::unique_ptr<WeightShards> shards_;
};

ChunkId id(std::size_t chunk) { return ChunkId{static_cast<std::uint32_t>(chunk)}; }

/// (ranks, copies of the weights)
using Copies = std::pair<std::size_t, std::size_t>;
constexpr std::array kCopies = {Copies{4, 2}, Copies{6, 2}, Copies{6, 3}, Copies{4, 4}};

std::unique_ptr<Rank> with_copies(ThreadMessages& messages, std::size_t rank, std::size_t copies) {
  return std::make_unique<Rank>(messages.of_rank(rank), kChunks, std::chrono::milliseconds(0),
                                copies);
}

template <typename Read>
std::string error_of(const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(WeightShardsTest, EveryRankReadsAllShardsWhateverTheOthersDo) {
  for (const std::size_t size : {1U, 2U, 3U, 4U}) {
    ThreadMessages messages(size);
    std::vector<std::unique_ptr<Rank>> ranks;
    for (std::size_t rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<Rank>(messages.of_rank(rank)));
    }
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(ranks.back()->read(chunk), ranks.back()->expected(chunk, 0));
    }
    EXPECT_EQ(ranks.back()->shards().bytes_read(), (size - 1) * kChunks * kShardBytes);
  }
}

TEST(WeightShardsTest, AChunkOfOneRankIsNotSharded) {
  ThreadMessages messages(1);
  Rank rank(messages.of_rank(0), /*not_cut=*/2);
  EXPECT_FALSE(rank.shards().sharded(id(2)));
  EXPECT_TRUE(rank.shards().sharded(id(3)));
  EXPECT_EQ(rank.shards().shard(id(3)).size(), kShardBytes);
}

TEST(WeightShardsTest, AReadWaitsForTheUpdateThatItsRankHasBegun) {
  ThreadMessages messages(2);
  Rank first(messages.of_rank(0));
  Rank second(messages.of_rank(1));
  first.shards().begin_update(id(1));
  second.shards().begin_update(id(1));
  std::vector<std::byte> whole(2 * kShardBytes);
  IoTransfer read = first.shards().start_read(1, whole);
  EXPECT_EQ(first.read(0), first.expected(0, 0));  // others are not held up
  first.update(1, 1);
  second.update(1, 1);
  read.wait();
  EXPECT_EQ(whole, first.expected(1, 1));
}

TEST(WeightShardsTest, ARankThatLeavesIsNamedByThoseThatWaitForIt) {
  ThreadMessages messages(3);
  Rank first(messages.of_rank(0));
  Rank second(messages.of_rank(1));
  Rank third(messages.of_rank(2));
  first.shards().begin_update(id(1));
  first.update(1, 1);
  third.shards().begin_update(id(1));
  third.update(1, 1);
  std::vector<std::byte> whole(3 * kShardBytes);
  IoTransfer read = first.shards().start_read(1, whole);
  second.shards().leave();
  const std::string error = error_of([&] { read.wait(); });
  EXPECT_NE(error.find("rank 0 of 3 lost the part of the weights that rank 1 keeps"),
            std::string::npos)
      << error;
  EXPECT_NE(error_of([&] { static_cast<void>(first.read(0)); }).find("rank 1 keeps"),
            std::string::npos);
}

TEST(WeightShardsTest, ARankThatIsKilledIsNamed) {
  ThreadMessages messages(2);
  Rank first(messages.of_rank(0));
  auto second = std::make_unique<Rank>(messages.of_rank(1));
  messages.kill(1);
  const std::string error = error_of([&] { static_cast<void>(first.read(0)); });
  EXPECT_NE(error.find("rank 1 keeps (zero_stage=3): it has ended"), std::string::npos) << error;
}

TEST(WeightShardsTest, ARankThatHearsNobodyAnyMoreSaysSoToThoseThatWaitForIt) {
  ThreadMessages messages(3);
  const Rank first(messages.of_rank(0));
  const Rank second(messages.of_rank(1));
  Rank third(messages.of_rank(2));
  messages.deafen(0);  // as gloo does where it notices the death of another rank
  const std::string error = error_of([&] { static_cast<void>(third.read(0)); });
  EXPECT_NE(error.find("rank 0 keeps (zero_stage=3): it has let go of the model"),
            std::string::npos)
      << error;
}

TEST(WeightShardsTest, ARunThatCannotGoOnIsNotWaitedForByItsOwnReads) {
  ThreadMessages messages(1);
  Rank rank(messages.of_rank(0));
  rank.shards().begin_update(id(0));
  rank.shards().leave();
  EXPECT_NE(error_of([&] { static_cast<void>(rank.read(0)); }).find("could not go on"),
            std::string::npos);
}

TEST(WeightShardsTest, ARankThatIsDoneAnswersUntilTheOthersAre) {
  ThreadMessages messages(2);
  auto first = std::make_unique<Rank>(messages.of_rank(0));
  auto second = std::make_unique<Rank>(messages.of_rank(1), kChunks, std::chrono::hours(1));
  std::thread ending([&] { second.reset(); });
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    EXPECT_EQ(first->read(chunk), first->expected(chunk, 0));
  }
  first.reset();
  ending.join();
}

TEST(WeightShardsTest, ARankThatIsDoneDoesNotWaitForOneThatHasLeft) {
  ThreadMessages messages(2);
  Rank first(messages.of_rank(0));
  first.shards().leave();
  const Rank second(messages.of_rank(1), kChunks, std::chrono::hours(1));
}

TEST(WeightShardsTest, AShardThatIsAheadOfWhatIsAskedForIsNotGiven) {
  ThreadMessages messages(2);
  Rank first(messages.of_rank(0));
  Rank second(messages.of_rank(1));
  second.shards().begin_update(id(0));
  second.update(0, 1);
  EXPECT_NE(error_of([&] { static_cast<void>(first.read(0)); }).find("rank 1 keeps"),
            std::string::npos);
}

TEST(WeightShardsTest, ACopyIsReadOfItsOwnRanks) {
  for (const auto& [size, copies] : kCopies) {
    ThreadMessages messages(size);
    std::vector<std::unique_ptr<Rank>> ranks;
    for (std::size_t rank = 0; rank < size; ++rank) {
      ranks.push_back(with_copies(messages, rank, copies));
    }
    Rank& first = *ranks[0];
    for (std::size_t rank = size / copies; rank < size; ++rank) {
      messages.kill(rank);  // of other copies
    }
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(first.read(chunk), first.expected(chunk, 0));
    }
    EXPECT_EQ(first.shards().bytes_read(), (size - copies) * kChunks * kShardBytes);
    EXPECT_EQ(first.shards().kept_ranks().size(), copies);
    EXPECT_EQ(first.shards().shard(id(3)).data(), first.shards().shard(id(3), 0).data());
  }
}

TEST(WeightShardsTest, RanksCannotKeepCopiesThatDoNotDivideThem) {
  ThreadMessages messages(4);
  EXPECT_THROW(WeightShards(messages.of_rank(0), {}, 0, 3), InvalidArgument);
  EXPECT_THROW(WeightShards(messages.of_rank(0), {}, 0, 0), InvalidArgument);
}

TEST(WeightShardsTest, AnUpdateIsFinishedWhereTheReplicasShardHasCome) {
  ThreadMessages messages(2);
  const auto first = with_copies(messages, 0, 2);
  const auto second = with_copies(messages, 1, 2);
  for (const std::size_t chunk : {0U, 1U}) {
    first->shards().begin_update(id(chunk));
    second->shards().begin_update(id(chunk));
  }
  first->update(0, 1);  // neither waits for the other, whatever the order
  first->update(1, 1);
  second->update(1, 1);
  second->update(0, 1);
  for (Rank* const rank : {first.get(), second.get()}) {
    EXPECT_EQ(rank->read(0), rank->expected(0, 1));
    EXPECT_EQ(rank->read(1), rank->expected(1, 1));
    rank->shards().await_exchanges();
    EXPECT_EQ(rank->shards().bytes_read(), 2 * kShardBytes);
    EXPECT_EQ(rank->shards().bytes_sent(), 2 * kShardBytes);
  }
}

TEST(WeightShardsTest, AReplicaThatIsKilledIsNamed) {
  ThreadMessages messages(2);
  const auto first = with_copies(messages, 0, 2);
  first->shards().begin_update(id(1));
  messages.kill(1);
  first->update(1, 1);
  const std::string said = "rank 0 of 2 lost the part of the weights that rank 1 keeps";
  const std::string of_read = error_of([&] { static_cast<void>(first->read(1)); });
  EXPECT_NE(of_read.find(said), std::string::npos) << of_read;
  const std::string at_the_barrier = error_of([&] { first->shards().await_exchanges(); });
  EXPECT_NE(at_the_barrier.find(said), std::string::npos) << at_the_barrier;
}

TEST(WeightShardsTest, AReplicaThatLeavesIsNamed) {
  ThreadMessages messages(4);
  const auto first = with_copies(messages, 0, 2);
  const auto third = with_copies(messages, 2, 2);
  first->shards().begin_update(id(1));
  first->update(1, 1);
  third->shards().leave();
  const std::string said = "that rank 2 keeps (zero_stage=3): it has let go of the model";
  const std::string of_update = error_of([&] { first->shards().await_exchanges(); });
  EXPECT_NE(of_update.find(said), std::string::npos) << of_update;
  const std::string of_next = error_of([&] { first->shards().begin_update(id(2)); });
  EXPECT_NE(of_next.find(said), std::string::npos) << of_next;
}

class WindowsTest : public testing::TestWithParam<Copies> {};

TEST_P(WindowsTest, ReadsAreOfTheStepTheyAreIn) {
  constexpr std::size_t kSteps = 20;
  const auto [size, copies] = GetParam();
  ThreadMessages messages(size);
  ThreadRanks threads(size);
  threads.run([&, num_copies = copies](Collectives& ranks) {
    const auto held = with_copies(messages, ranks.rank(), num_copies);
    Rank& own = *held;
    auto window = own.window();
    std::thread updates;
    std::minstd_rand random(static_cast<unsigned>(7 + ranks.rank()));
    for (std::size_t step = 0; step < kSteps; ++step) {
      for (std::size_t reads = random() % 6; reads > 0; --reads) {  // each rank others, or none
        const std::size_t chunk = random() % kChunks;
        window->prefetch(random() % kChunks);
        window->use(chunk, StreamAccess::kRead, [&](auto payloads) {
          const std::vector<std::byte> whole(payloads[0].begin(), payloads[0].end());
          EXPECT_EQ(whole, own.expected(chunk, step));
        });
      }
      window->await_reads();
      if (updates.joinable()) {
        updates.join();
      }
      own.shards().await_exchanges();
      barrier(ranks);
      std::vector<std::size_t> order;
      for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
        own.shards().begin_update(id(chunk));
        window->forget(chunk);
        order.push_back(chunk);
      }
      std::shuffle(order.begin(), order.end(), random);  // each rank another
      updates = std::thread([&own, order, step] {        // beside the reads of the next step
        for (const std::size_t chunk : order) {
          own.update(chunk, step + 1);
        }
      });
    }
    updates.join();
    own.shards().await_exchanges();
    window->await_reads();
    barrier(ranks);  // nobody goes before the others have read
  });
  for (const std::string& failure : threads.failures()) {
    EXPECT_EQ(failure, "");
  }
}

INSTANTIATE_TEST_SUITE_P(Copies, WindowsTest,
                         testing::Values(Copies{3, 1}, Copies{4, 2}, Copies{3, 3}, Copies{6, 3}));

}  // namespace
}  // namespace castor
