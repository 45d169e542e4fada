#include "core/chunk_reads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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

TEST(ChunkReadsTest, NobodyWaitsWhereNothingIsRead) {
  ChunkReads reads(2);
  EXPECT_FALSE(reads.reading());
  EXPECT_FALSE(reads.reading(kFirst));
  reads.wait(kFirst);
  reads.wait_for_all();
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

TEST(ChunkReadsTest, WhoWaitsIsWokenByItsChunk) {
  ChunkReads reads(2);
  reads.begin();
  std::atomic<bool> woken = false;
  std::jthread waiter([&] {
    reads.wait(kSecond);
    woken = true;
  });
  reads.end(kFirst);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(woken) << "another chunk is not the one that is waited for";
  reads.end(kSecond);
  waiter.join();
}

TEST(ChunkReadsTest, WhoWouldWriteCopiesWhatCanBeCopied) {
  std::vector<ChunkId> copied;
  ChunkReads reads(2, [&](ChunkId chunk) {
    copied.push_back(chunk);
    return chunk == kFirst;
  });
  EXPECT_TRUE(reads.let_go(kFirst)) << "nobody reads";
  EXPECT_TRUE(copied.empty());
  reads.begin();
  reads.wait(kFirst);
  EXPECT_FALSE(reads.reading(kFirst));
  EXPECT_TRUE(reads.let_go(kFirst));
  EXPECT_FALSE(reads.let_go(kSecond));
  EXPECT_TRUE(reads.reading(kSecond));
  EXPECT_EQ(copied, (std::vector<ChunkId>{kFirst, kSecond}));
  std::jthread waiter([&] { reads.wait_for_all(); });
  reads.end(kSecond);
}

TEST(ChunkReadsTest, ASaveThatFailsLetsEverybodyGo) {
  ChunkReads reads(2);
  reads.begin();
  std::jthread of_one([&] { reads.wait(kSecond); });
  std::jthread of_all([&] { reads.wait_for_all(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
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
