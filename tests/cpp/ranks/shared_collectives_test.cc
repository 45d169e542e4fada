#include "ranks/shared_collectives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <latch>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_collectives.h"

namespace castor {
namespace {

std::vector<std::byte> bytes_of(std::size_t rank, std::size_t number, std::size_t bytes) {
  std::minstd_rand random(static_cast<unsigned>(1000 * number + rank + 1));
  std::vector<std::byte> values(bytes);
  for (std::byte& value : values) {
    value = static_cast<std::byte>(random());
  }
  return values;
}

/// What `rank` has after an all-to-all of bytes_of(every rank, number).
std::vector<std::byte> parts_for(std::size_t rank, std::size_t ranks, std::size_t number,
                                 std::size_t part) {
  std::vector<std::byte> parts;
  for (std::size_t other = 0; other < ranks; ++other) {
    const std::vector<std::byte> sent = bytes_of(other, number, part * ranks);
    const auto begin = sent.begin() + static_cast<std::ptrdiff_t>(rank * part);
    parts.insert(parts.end(), begin, begin + static_cast<std::ptrdiff_t>(part));
  }
  return parts;
}

class SharedCollectivesTest : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Sizes, SharedCollectivesTest, ::testing::Values(2, 3, 5));

TEST_P(SharedCollectivesTest, EveryRankGetsWhatTheOthersGive) {
  ThreadRanks threads(GetParam(), 1);
  threads.run([&](Collectives& group) {
    const SharedCollectives shared = share_memory(group, group.size());
    ASSERT_NE(shared.ranks, nullptr) << shared.refusal;
    Collectives& ranks = *shared.ranks;
    EXPECT_EQ(ranks.rank(), group.rank());
    EXPECT_EQ(ranks.size(), group.size());
    std::size_t number = 0;
    for (const std::size_t bytes : {1, 64, 100'000, 1 << 19, (1 << 19) + 1, 3'000'000, 0}) {
      const std::vector<std::byte> own = bytes_of(ranks.rank(), ++number, bytes);
      std::vector<std::byte> all(bytes * ranks.size());
      ranks.all_gather(own, all);
      std::vector<std::byte> expected;
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        const std::vector<std::byte> theirs = bytes_of(rank, number, bytes);
        expected.insert(expected.end(), theirs.begin(), theirs.end());
      }
      EXPECT_EQ(all, expected);

      const std::vector<std::byte> sent = bytes_of(ranks.rank(), ++number, bytes * ranks.size());
      std::vector<std::byte> received(sent.size());
      ranks.all_to_all(sent, received);
      EXPECT_EQ(received, parts_for(ranks.rank(), ranks.size(), number, bytes));

      std::vector<std::byte> passed(bytes);
      ranks.ring_shift(bytes_of(ranks.rank(), ++number, bytes), passed);
      const std::size_t before = (ranks.rank() + ranks.size() - 1) % ranks.size();
      EXPECT_EQ(passed, bytes_of(before, number, bytes));
    }
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(GetParam()));
}

TEST_P(SharedCollectivesTest, APartOfTheResultMayBeWhatIsSent) {
  constexpr std::size_t kBytes = 700'001;
  ThreadRanks threads(GetParam(), 2);
  threads.run([&](Collectives& group) {
    const SharedCollectives shared = share_memory(group, group.size());
    ASSERT_NE(shared.ranks, nullptr) << shared.refusal;
    std::vector<std::byte> all(kBytes * group.size());
    const std::span own = std::span(all).subspan(group.rank() * kBytes, kBytes);
    std::ranges::copy(bytes_of(group.rank(), 1, kBytes), own.begin());
    shared.ranks->all_gather(own, all);
    for (std::size_t rank = 0; rank < group.size(); ++rank) {
      const auto theirs = std::span(all).subspan(rank * kBytes, kBytes);
      EXPECT_TRUE(std::ranges::equal(theirs, bytes_of(rank, 1, kBytes)));
    }
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(GetParam()));
}

TEST_P(SharedCollectivesTest, ARankThatHasLetGoIsNamedAndNobodyWaitsForItAgain) {
  ThreadRanks threads(GetParam(), 3);
  threads.run([&](Collectives& group) {
    const SharedCollectives shared = share_memory(group, group.size());
    ASSERT_NE(shared.ranks, nullptr) << shared.refusal;
    std::vector<std::byte> all(group.size());
    shared.ranks->all_gather(std::array{std::byte{1}}, all);
    if (group.rank() != 1) {
      EXPECT_THROW(shared.ranks->all_gather(std::array{std::byte{1}}, all), Error);
      shared.ranks->all_gather(std::array{std::byte{1}}, all);
    }
  });
  for (std::size_t rank = 0; rank < GetParam(); ++rank) {
    const std::string& failure = threads.failures()[rank];
    EXPECT_EQ(failure.empty(), rank == 1);
    EXPECT_TRUE(rank == 1 || failure.find(") has let go of the model") != std::string::npos)
        << failure;
  }
}

TEST_P(SharedCollectivesTest, ARankThatLeavesIsNamedToThoseThatWaitAndMeetsNobodyAgain) {
  ThreadRanks threads(GetParam(), 4);
  threads.run([&](Collectives& group) {
    const SharedCollectives shared = share_memory(group, group.size());
    ASSERT_NE(shared.ranks, nullptr) << shared.refusal;
    std::vector<std::byte> all(group.size());
    shared.ranks->all_gather(std::array{std::byte{1}}, all);
    if (group.rank() == 1) {
      shared.ranks->leave();
    }
    shared.ranks->all_gather(std::array{std::byte{1}}, all);
  });
  for (std::size_t rank = 0; rank < GetParam(); ++rank) {
    const std::string& failure = threads.failures()[rank];
    EXPECT_NE(
        failure.find(rank == 1 ? "it has let go of the model itself" : ") has let go of the model"),
        std::string::npos)
        << failure;
  }
}

// From another thread than the one that waits; the other rank is there, and does not come.
TEST(SharedCollectivesLeaveTest, LeavingEndsAWaitOfItsOwn) {
  ThreadRanks threads(2);
  std::latch over(1);
  threads.run([&](Collectives& group) {
    const SharedCollectives shared = share_memory(group, group.size());
    ASSERT_NE(shared.ranks, nullptr) << shared.refusal;
    if (group.rank() == 1) {
      over.wait();
      return;
    }
    const std::jthread leaving([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      shared.ranks->leave();
    });
    std::vector<std::byte> all(group.size());
    EXPECT_THROW(shared.ranks->all_gather(std::array{std::byte{1}}, all), Error);
    over.count_down();
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(2));
}

}  // namespace
}  // namespace castor
