#include "dist/weight_parts.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "io/chunk_stream.h"
#include "parallel/thread_executor.h"

namespace castor {
namespace {

constexpr std::size_t kPartBytes = 64;
constexpr std::size_t kChunks = 5;

/// One rank's parts: bytes say of which rank, chunk and version they are.
class Rank {
 public:
  explicit Rank(std::shared_ptr<RankMessages> messages, std::size_t not_cut = kChunks,
                std::chrono::milliseconds patience = std::chrono::milliseconds(0))
      : rank_(messages->rank()), size_(messages->size()) {
    std::vector<std::span<std::byte>> parts;
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      memory_.emplace_back(kPartBytes, value(rank_, chunk, 0));
      parts.push_back(std::span(memory_[chunk]).first(chunk == not_cut ? 0 : kPartBytes));
    }
    const std::size_t num_weights = parts.size();
    parts_ =
        std::make_unique<WeightParts>(std::move(messages), std::move(parts), num_weights, patience);
  }

  [[nodiscard]] static std::byte value(std::size_t rank, std::size_t chunk, std::size_t version) {
    return static_cast<std::byte>(1 + rank + 5 * chunk + 41 * version);
  }
  [[nodiscard]] WeightParts& parts() { return *parts_; }
  void update(std::size_t chunk, std::size_t version) {
    std::memset(memory_[chunk].data(), std::to_integer<int>(value(rank_, chunk, version)),
                kPartBytes);
    parts_->end_update(ChunkId{static_cast<std::uint32_t>(chunk)});
  }
  [[nodiscard]] std::vector<std::byte> read(std::size_t chunk) {
    std::vector<std::byte> whole(size_ * kPartBytes);
    parts_->start_read(chunk, whole).wait();
    return whole;
  }
  [[nodiscard]] std::vector<std::byte> expected(std::size_t chunk, std::size_t version) const {
    std::vector<std::byte> whole;
    for (std::size_t rank = 0; rank < size_; ++rank) {
      whole.insert(whole.end(), kPartBytes, value(rank, chunk, version));
    }
    return whole;
  }
  /// A window of two slots on the chunks.
  [[nodiscard]] std::unique_ptr<ChunkStream> window() {
    window_.resize(ChunkStream::memory_bytes(size_ * kPartBytes, 2, 64));
    std::vector<StoredChunk> chunks(kChunks);
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      chunks[chunk].emplace_back(*parts_, chunk, "chunk", size_ * kPartBytes);
    }
    return std::make_unique<ChunkStream>(std::move(chunks), executor_, window_, 64, 2);
  }

 private:
  const std::size_t rank_;
  const std::size_t size_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte> window_;
  ThreadExecutor executor_{1};
  std::unique_ptr<WeightParts> parts_;
};

ChunkId id(std::size_t chunk) { return ChunkId{static_cast<std::uint32_t>(chunk)}; }

template <typename Read>
std::string error_of(const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(WeightPartsTest, EveryRankReadsAllPartsWhateverTheOthersDo) {
  for (const std::size_t size : {1U, 2U, 3U, 4U}) {
    ThreadMessages messages(size);
    std::vector<std::unique_ptr<Rank>> ranks;
    for (std::size_t rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<Rank>(messages.of_rank(rank)));
    }
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(ranks.back()->read(chunk), ranks.back()->expected(chunk, 0));
    }
    EXPECT_EQ(ranks.back()->parts().bytes_read(), (size - 1) * kChunks * kPartBytes);
  }
}

TEST(WeightPartsTest, AChunkOfOneRankIsNotCut) {
  ThreadMessages messages(1);
  Rank rank(messages.of_rank(0), /*not_cut=*/2);
  EXPECT_FALSE(rank.parts().cut(id(2)));
  EXPECT_TRUE(rank.parts().cut(id(3)));
  EXPECT_EQ(rank.parts().part(id(3)).size(), kPartBytes);
}

TEST(WeightPartsTest, AReadWaitsForTheUpdateThatItsRankHasBegun) {
  ThreadMessages messages(2);
  Rank first(messages.of_rank(0));
  Rank second(messages.of_rank(1));
  first.parts().begin_update(id(1));
  second.parts().begin_update(id(1));
  std::vector<std::byte> whole(2 * kPartBytes);
  IoTransfer read = first.parts().start_read(1, whole);
  EXPECT_EQ(first.read(0), first.expected(0, 0));  // others are not held up
  first.update(1, 1);
  second.update(1, 1);
  read.wait();
  EXPECT_EQ(whole, first.expected(1, 1));
}

TEST(WeightPartsTest, ARankThatLeavesIsNamedByThoseThatWaitForIt) {
  ThreadMessages messages(3);
  Rank first(messages.of_rank(0));
  Rank second(messages.of_rank(1));
  Rank third(messages.of_rank(2));
  first.parts().begin_update(id(1));
  first.update(1, 1);
  third.parts().begin_update(id(1));
  third.update(1, 1);
  std::vector<std::byte> whole(3 * kPartBytes);
  IoTransfer read = first.parts().start_read(1, whole);
  second.parts().leave();
  const std::string error = error_of([&] { read.wait(); });
  EXPECT_NE(error.find("rank 0 of 3 lost the part of the weights that rank 1 keeps"),
            std::string::npos)
      << error;
  EXPECT_NE(error_of([&] { static_cast<void>(first.read(0)); }).find("rank 1 keeps"),
            std::string::npos);
}

TEST(WeightPartsTest, ARankThatIsKilledIsNamed) {
  ThreadMessages messages(2);
  Rank first(messages.of_rank(0));
  auto second = std::make_unique<Rank>(messages.of_rank(1));
  messages.kill(1);
  const std::string error = error_of([&] { static_cast<void>(first.read(0)); });
  EXPECT_NE(error.find("rank 1 keeps (zero_stage=3): it has ended"), std::string::npos) << error;
}

TEST(WeightPartsTest, ARunThatCannotGoOnIsNotWaitedForByItsOwnReads) {
  ThreadMessages messages(1);
  Rank rank(messages.of_rank(0));
  rank.parts().begin_update(id(0));
  rank.parts().leave();
  EXPECT_NE(error_of([&] { static_cast<void>(rank.read(0)); }).find("could not go on"),
            std::string::npos);
}

TEST(WeightPartsTest, ARankThatIsDoneAnswersUntilTheOthersAre) {
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

TEST(WeightPartsTest, ARankThatIsDoneDoesNotWaitForOneThatHasLeft) {
  ThreadMessages messages(2);
  Rank first(messages.of_rank(0));
  first.parts().leave();
  const Rank second(messages.of_rank(1), kChunks, std::chrono::hours(1));
}

TEST(WeightPartsTest, APartThatIsAheadOfWhatIsAskedForIsNotGiven) {
  ThreadMessages messages(2);
  Rank first(messages.of_rank(0));
  Rank second(messages.of_rank(1));
  second.parts().begin_update(id(0));
  second.update(0, 1);
  EXPECT_NE(error_of([&] { static_cast<void>(first.read(0)); }).find("rank 1 keeps"),
            std::string::npos);
}

TEST(WeightPartsTest, ReadsThroughAWindowAreOfTheStepTheyAreIn) {
  constexpr std::size_t kSize = 3;
  constexpr std::size_t kSteps = 20;
  ThreadMessages messages(kSize);
  ThreadRanks threads(kSize);
  threads.run([&](Collectives& ranks) {
    Rank own(messages.of_rank(ranks.rank()));
    auto window = own.window();
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
      meet(ranks);
      for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
        own.parts().begin_update(id(chunk));
        window->forget(chunk);
      }
      for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
        own.update(chunk, step + 1);
      }
    }
    window->await_reads();
    meet(ranks);  // nobody goes before the others have read
  });
  for (const std::string& failure : threads.failures()) {
    EXPECT_EQ(failure, "");
  }
}

}  // namespace
}  // namespace castor
