#include "core/chunk_reads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "core/error.h"

namespace castor {
namespace {

constexpr ChunkId kFirst{0};
constexpr ChunkId kSecond{1};

/// Returns when a thread waits for the reads.
void await_waiter(const ChunkReads& reads) {
  while (!reads.awaited()) {
    std::this_thread::yield();
  }
}

TEST(ChunkReadsTest, NobodyWaitsWhereNothingIsRead) {
  ChunkReads reads(2);
  EXPECT_FALSE(reads.reading());
  EXPECT_FALSE(reads.reading(kFirst));
  reads.wait(kFirst);
  reads.wait_for_all();
  EXPECT_FALSE(reads.awaited());
}

TEST(ChunkReadsTest, AChunkThatHasBeenReadIsFreeWhileOthersAreRead) {
  ChunkReads reads(2);
  reads.begin();
  EXPECT_TRUE(reads.reading(kFirst));
  reads.end(kFirst);
  reads.end(kFirst);  // counts once
  reads.wait(kFirst);
  EXPECT_TRUE(reads.reading(kSecond));
  EXPECT_TRUE(reads.reading());
  reads.end(kSecond);
  EXPECT_FALSE(reads.reading());
}

TEST(ChunkReadsTest, OneSaveReadsAtATime) {
  ChunkReads reads(2);
  reads.begin();
  reads.end(kFirst);
  EXPECT_THROW(reads.begin(), UsageError);
  EXPECT_FALSE(reads.reading(kFirst)) << "the refused one must change nothing";
  reads.end_all();
  reads.begin();
  EXPECT_TRUE(reads.reading(kFirst));
}

TEST(ChunkReadsTest, WhoWaitsIsSeenAndWoken) {
  ChunkReads reads(2);
  reads.begin();
  std::jthread waiter([&] { reads.wait(kSecond); });
  await_waiter(reads);
  reads.end(kFirst);
  EXPECT_TRUE(reads.awaited()) << "another chunk is not the one that is waited for";
  reads.end(kSecond);
  waiter.join();
  EXPECT_FALSE(reads.awaited());
}

TEST(ChunkReadsTest, ASaveThatFailsLetsEverybodyGo) {
  ChunkReads reads(2);
  reads.begin();
  std::jthread of_one([&] { reads.wait(kSecond); });
  std::jthread of_all([&] { reads.wait_for_all(); });
  await_waiter(reads);
  reads.end_all();
  of_one.join();
  of_all.join();
  EXPECT_FALSE(reads.reading());
}

// Each writer changes its chunk as soon as it may; the reader sees every chunk as it was.
TEST(ChunkReadsTest, NoWriterIsAheadOfTheReader) {
  constexpr std::size_t kChunks = 16;
  constexpr int kSaves = 30;
  ChunkReads reads(kChunks);
  std::vector<int> values(kChunks, 0);
  std::mt19937 random(7);
  for (int save = 0; save < kSaves; ++save) {
    reads.begin();
    std::vector<std::jthread> writers;
    for (const std::size_t begin : {0U, 1U}) {
      writers.emplace_back([&, begin] {
        for (std::size_t i = begin; i < kChunks; i += 2) {
          reads.wait(ChunkId{static_cast<std::uint32_t>(i)});
          ++values[i];
        }
      });
    }
    std::vector<std::uint32_t> order(kChunks);
    std::ranges::generate(order, [i = 0U]() mutable { return i++; });
    std::ranges::shuffle(order, random);
    for (const std::uint32_t i : order) {
      EXPECT_EQ(values[i], save);
      reads.end(ChunkId{i});
    }
    writers.clear();
  }
  EXPECT_EQ(std::ranges::count(values, kSaves), static_cast<std::ptrdiff_t>(kChunks));
}

}  // namespace
}  // namespace castor
