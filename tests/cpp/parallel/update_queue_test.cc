#include "parallel/update_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <latch>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/error.h"

namespace castor {
namespace {

constexpr ChunkId chunk_id(std::size_t i) { return static_cast<ChunkId>(i); }

using Next = std::span<const ChunkId>;

/// The order in which updates ran, with the first one held back until the test lets it go.
struct Journal {
  std::latch gate{1};
  std::latch started{1};
  std::mutex mutex;
  std::vector<std::size_t> ran;

  UpdateFunction held(std::size_t chunk) {
    return [this, chunk](Next) {
      started.count_down();
      gate.wait();
      note(chunk);
    };
  }
  UpdateFunction free(std::size_t chunk) {
    return [this, chunk](Next) { note(chunk); };
  }
  void note(std::size_t chunk) {
    const std::lock_guard lock(mutex);
    ran.push_back(chunk);
  }
};

TEST(UpdateQueueTest, OfRanksUpdatesStayInTheOrderOfSubmissionWhateverIsWanted) {
  Journal journal;
  UpdateQueue queue(3, UpdateOrder::kSubmitted);
  queue.submit(chunk_id(0), journal.held(0));
  queue.submit(chunk_id(1), journal.free(1));
  queue.submit(chunk_id(2), journal.free(2));
  journal.started.wait();
  std::jthread waiter([&] { queue.wait(chunk_id(2)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  journal.gate.count_down();
  queue.drain();
  EXPECT_EQ(journal.ran, (std::vector<std::size_t>{0, 1, 2}));
}

TEST(UpdateQueueTest, UpdatesRunInTheOrderOfSubmission) {
  Journal journal;
  UpdateQueue queue(4);
  queue.submit(chunk_id(2), journal.held(2));
  queue.submit(chunk_id(0), journal.free(0));
  queue.submit(chunk_id(3), journal.free(3));
  EXPECT_TRUE(queue.pending(chunk_id(2)));
  EXPECT_TRUE(queue.pending(chunk_id(3)));
  EXPECT_FALSE(queue.pending(chunk_id(1)));
  journal.gate.count_down();
  queue.drain();
  EXPECT_EQ(journal.ran, (std::vector<std::size_t>{2, 0, 3}));
  EXPECT_FALSE(queue.pending(chunk_id(3)));
}

TEST(UpdateQueueTest, TheChunkThatIsWaitedForIsUpdatedNext) {
  Journal journal;
  UpdateQueue queue(4);
  queue.submit(chunk_id(0), journal.held(0));
  journal.started.wait();
  for (const std::size_t chunk : {1, 2, 3}) {
    queue.submit(chunk_id(chunk), journal.free(chunk));
  }
  std::thread release([&] { journal.gate.count_down(); });
  queue.wait(chunk_id(3));
  EXPECT_FALSE(queue.pending(chunk_id(3)));
  release.join();
  queue.drain();
  ASSERT_EQ(journal.ran.size(), 4u);
  EXPECT_EQ(journal.ran.front(), 0u);
  // wait() may have come before or after the release; only a chunk that was not taken yet moves up.
  EXPECT_TRUE(std::find(journal.ran.begin(), journal.ran.end(), 3u) != journal.ran.end());
}

TEST(UpdateQueueTest, WaitingForAChunkThatIsNotPendingReturnsAtOnce) {
  UpdateQueue queue(2);
  queue.wait(chunk_id(1));
  queue.drain();
}

TEST(UpdateQueueTest, AChunkIsNotUpdatedTwiceAtOnce) {
  Journal journal;
  UpdateQueue queue(1);
  queue.submit(chunk_id(0), journal.held(0));
  EXPECT_THROW(queue.submit(chunk_id(0), journal.free(0)), UsageError);
  journal.gate.count_down();
  queue.wait(chunk_id(0));
  queue.submit(chunk_id(0), journal.free(0));
  queue.drain();
  EXPECT_EQ(journal.ran.size(), 2u);
}

TEST(UpdateQueueTest, AFailureDropsTheRestAndIsToldToEveryoneAfter) {
  Journal journal;
  UpdateQueue queue(3);
  queue.submit(chunk_id(0), [&](Next) {
    journal.started.count_down();
    journal.gate.wait();
    throw std::runtime_error("injected");
  });
  queue.submit(chunk_id(1), journal.free(1));
  journal.started.wait();
  journal.gate.count_down();
  EXPECT_THROW(queue.wait(chunk_id(1)), std::runtime_error);
  EXPECT_THROW(queue.drain(), std::runtime_error);
  EXPECT_THROW(queue.submit(chunk_id(2), journal.free(2)), std::runtime_error);
  EXPECT_FALSE(queue.pending(chunk_id(1)));
  EXPECT_TRUE(journal.ran.empty());
}

TEST(UpdateQueueTest, AFailureThatIsAbandonedIsForgotten) {
  Journal journal;
  UpdateQueue queue(3);
  queue.submit(chunk_id(0), [](Next) { throw std::runtime_error("injected"); });
  queue.abandon();
  EXPECT_NO_THROW(queue.drain());
  queue.submit(chunk_id(2), journal.free(2));
  queue.abandon();  // nothing failed: all of it has run
  EXPECT_EQ(journal.ran, (std::vector<std::size_t>{2}));
}

TEST(UpdateQueueTest, AnUpdateIsToldWhatFollows) {
  Journal journal;
  UpdateQueue queue(12);
  std::vector<ChunkId> after_first;
  std::vector<ChunkId> after_last{chunk_id(99)};
  queue.submit(chunk_id(0), journal.held(0));
  queue.submit(chunk_id(1), [&](Next next) { after_first.assign(next.begin(), next.end()); });
  queue.submit(chunk_id(7), journal.free(7));
  queue.submit(chunk_id(3), [&](Next next) { after_last.assign(next.begin(), next.end()); });
  journal.started.wait();
  journal.gate.count_down();
  queue.drain();
  EXPECT_EQ(after_first, (std::vector<ChunkId>{chunk_id(7), chunk_id(3)}));
  EXPECT_TRUE(after_last.empty());
}

TEST(UpdateQueueTest, DestructionCompletesWhatWasSubmitted) {
  std::atomic<int> ran = 0;
  {
    UpdateQueue queue(64);
    for (std::size_t i = 0; i < 64; ++i) {
      queue.submit(chunk_id(i), [&](Next) { ++ran; });
    }
  }
  EXPECT_EQ(ran, 64);
}

TEST(UpdateQueueTest, WhatAnUpdateHoldsIsGoneBeforeTheWaitReturns) {
  auto held = std::make_shared<int>(1);
  UpdateQueue queue(1);
  queue.submit(chunk_id(0), [held](Next) {});
  queue.wait(chunk_id(0));
  EXPECT_EQ(held.use_count(), 1);
}

// Every chunk carries a value that only its update writes and only those who waited read.
TEST(UpdateQueueTest, WhoeverWaitedSeesWhatTheUpdateWrote) {
  constexpr std::size_t kChunks = 32;
  constexpr int kSteps = 200;
  std::array<std::uint64_t, kChunks> values{};
  UpdateQueue queue(kChunks);
  for (int step = 1; step <= kSteps; ++step) {
    for (std::size_t i = 0; i < kChunks; ++i) {
      queue.submit(chunk_id(i), [&values, i](Next) { values[i] += i + 1; });
    }
    std::vector<std::jthread> readers;
    for (unsigned seed = 0; seed < 2; ++seed) {
      readers.emplace_back([&, seed] {
        std::mt19937 random(seed + static_cast<unsigned>(step));
        for (int read = 0; read < 8; ++read) {
          const std::size_t i = random() % kChunks;
          queue.wait(chunk_id(i));
          EXPECT_EQ(values[i], static_cast<std::uint64_t>(step) * (i + 1));
        }
      });
    }
    readers.clear();
    queue.drain();
  }
}

}  // namespace
}  // namespace castor
