#include "host/shared_host_storage.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "host/forks.h"
#include "host/page_source.h"
#include "host/residency.h"

namespace castor {
namespace {

/// Two ranks' storage of one file, in one process: mappings of their own, as in two.
class SharedHostStorageTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kPages = 5000;  // more than are asked for at once

  SharedHostStorageTest() {
    const int file = make_shared_file(bytes());
    for (Rank& rank : ranks_) {
      rank.storage = std::make_unique<SharedHostStorage>(file, bytes());
      rank.arena = rank.storage->make_arena();
    }
    ::close(file);
  }
  static std::size_t page() { return system_page_sizes().page; }
  static std::size_t bytes() { return kPages * page(); }

  struct Rank {
    std::unique_ptr<SharedHostStorage> storage;
    std::unique_ptr<Arena> arena;
    std::span<std::byte> block;

    void take(std::size_t bytes) { block = {arena->allocate(bytes), bytes}; }
  };
  void take(std::size_t bytes) {
    for (Rank& rank : ranks_) {
      rank.take(bytes);
    }
  }
  static void fill(std::span<std::byte> bytes, int value) {
    std::memset(bytes.data(), value, bytes.size());
  }
  /// Not std::equal, which takes bytes one by one: under TSan most of a minute.
  static bool same(std::span<const std::byte> bytes, std::span<const std::byte> others) {
    return bytes.size() == others.size() &&
           std::memcmp(bytes.data(), others.data(), bytes.size()) == 0;
  }
  static bool all(std::span<const std::byte> bytes, int value) {
    return std::all_of(bytes.begin(), bytes.end(),
                       [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }

  std::array<Rank, 2> ranks_;
};

TEST_F(SharedHostStorageTest, BlocksBeginWithPagesAndAreTheSameOnAllRanks) {
  for (const std::size_t bytes : {std::size_t{1}, page(), page() + 1, 3 * page()}) {
    take(bytes);
    for (const Rank& rank : ranks_) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(rank.block.data()) % page(), 0U);
      EXPECT_TRUE(rank.storage->contains(rank.block.data()));
    }
    EXPECT_FALSE(ranks_[0].storage->contains(ranks_[1].block.data()));
    fill({ranks_[0].storage->common(ranks_[0].block.data()), bytes}, 7);
    EXPECT_TRUE(all(ranks_[1].block, 7));
  }
  EXPECT_THROW(ranks_[0].take(bytes()), OutOfMemory);
}

TEST_F(SharedHostStorageTest, WhatARankWritesIsItsOwnUntilItIsPublishedAndSeenByAllWhoForget) {
  take(10 * page());
  auto& [first, second] = ranks_;
  fill(first.block.subspan(page(), 2 * page()), 1);
  fill(second.block.subspan(page(), 2 * page()), 2);
  EXPECT_TRUE(all(second.block.first(page()), 0));
  EXPECT_TRUE(all(first.block.subspan(page(), 2 * page()), 1));
  EXPECT_TRUE(all(second.block.subspan(page(), 2 * page()), 2));

  first.storage->publish(first.block.first(2 * page()));  // the copy's first page only
  EXPECT_TRUE(all(second.block.subspan(page(), 2 * page()), 2));
  first.storage->forget(first.block);
  second.storage->forget(second.block);
  for (const Rank& rank : ranks_) {
    EXPECT_TRUE(all(rank.block.subspan(page(), page()), 1));
    EXPECT_TRUE(all(rank.block.subspan(2 * page()), 0));
  }
}

TEST_F(SharedHostStorageTest, PublishesTheBytesThatItIsGivenAndNoOthersOfTheirPages) {
  take(3 * page());
  auto& [first, second] = ranks_;
  fill(first.block, 1);
  first.storage->publish(first.block.subspan(page() / 2, page()));
  EXPECT_TRUE(all(second.block.first(page() / 2), 0));
  EXPECT_TRUE(all(second.block.subspan(page() / 2, page()), 1));
  EXPECT_TRUE(all(second.block.subspan(page() + page() / 2), 0));
}

TEST_F(SharedHostStorageTest, ForgetsWholePagesWithin) {
  take(4 * page());
  auto& [first, second] = ranks_;
  fill(first.block, 1);
  first.storage->forget_within(first.block.subspan(1, 3 * page()));
  EXPECT_TRUE(all(first.block.first(page()), 1));
  EXPECT_TRUE(all(first.block.subspan(page(), 2 * page()), 0));
  EXPECT_TRUE(all(first.block.subspan(3 * page()), 1));
  first.storage->forget_within(first.block.subspan(1, page()));  // not one
  EXPECT_TRUE(all(first.block.first(page()), 1));
}

TEST_F(SharedHostStorageTest, ACopyThatIsBegunIsOfZerosUntilItIsForgotten) {
  take(6 * page());
  auto& [first, second] = ranks_;
  const std::span<std::byte> block = first.block.subspan(0, 6 * page());
  fill({first.storage->common(block.data()), block.size()}, 1);
  fill(block.first(page()), 2);
  for (int times = 0; times < 2; ++times) {
    first.storage->begin_copy(block);
    EXPECT_TRUE(all(block, 0));
    fill(block.subspan(page(), page()), 3);
    EXPECT_TRUE(all(second.block, 1));
  }
  first.storage->publish(block.subspan(page(), page()));
  first.storage->forget(block);
  for (const Rank& rank : ranks_) {
    EXPECT_TRUE(all(rank.block.first(page()), 1));
    EXPECT_TRUE(all(rank.block.subspan(page(), page()), 3));
    EXPECT_TRUE(all(rank.block.subspan(2 * page()), 1));
  }
  fill(block, 4);  // as ever after that
  first.storage->forget(block);
  EXPECT_TRUE(all(block.subspan(page(), page()), 3));
}

// Two ranks' edits, each rank's updates of its half in common memory, and their barriers, against
// what each should see.
TEST_F(SharedHostStorageTest, RandomEditsAndUpdatesAreThoseOfTwoCopies) {
  const std::size_t bytes = 4300 * page() + 100;
  take(bytes);
  const std::size_t half = bytes / 2;
  std::minstd_rand random(3);
  std::vector<std::byte> expected(bytes);
  for (int step = 0; step < 30; ++step) {
    for (int edit = 0; edit < 20; ++edit) {  // the same on both ranks
      const std::size_t begin = random() % bytes;
      const std::size_t count = std::min<std::size_t>(random() % (20 * page()), bytes - begin);
      const int value = static_cast<int>(random() % 250);
      fill(std::span(expected).subspan(begin, count), value);
      for (Rank& rank : ranks_) {
        fill(rank.block.subspan(begin, count), value);
      }
    }
    if (step % 3 == 0) {  // all of it anew, on one rank or both
      fill(expected, step);
      for (std::size_t i = 0; i < 2; ++i) {
        if (step % 2 == 0 || i == 0) {
          ranks_[i].storage->begin_copy(ranks_[i].block);
        }
        fill(ranks_[i].block, step);
      }
    }
    for (const Rank& rank : ranks_) {
      EXPECT_TRUE(same(expected, rank.block));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const std::span<std::byte> own = ranks_[i].block.subspan(i * half, half);
      ranks_[i].storage->publish(own);
      for (int update = 0; update < 10; ++update) {
        const std::size_t at = random() % half;
        ranks_[i].storage->common(own.data())[at] = static_cast<std::byte>(update + 1);
        expected[i * half + at] = static_cast<std::byte>(update + 1);
      }
    }
    for (Rank& rank : ranks_) {
      rank.storage->forget(rank.block);
      EXPECT_TRUE(same(expected, rank.block));
    }
  }
}

TEST_F(SharedHostStorageTest, CopiesGiveTheirMemoryBack) {
  take(4000 * page());
  auto& [first, second] = ranks_;
  fill({first.storage->common(first.block.data()), first.block.size()}, 1);
  EXPECT_TRUE(all(first.block, 1));
  const std::size_t before = testing::process_resident_bytes();
  for (const bool begun : {false, true}) {
    if (begun) {
      first.storage->begin_copy(first.block);
    }
    fill(first.block, 2);
    first.storage->publish(first.block);
    first.storage->forget(first.block);
    EXPECT_TRUE(all(first.block, 2));
  }
  EXPECT_LT(testing::process_resident_bytes(), before + 100 * page());
}

TEST_F(SharedHostStorageTest, ABlockOutlivesTheStorageAndKeepsItsBytes) {
  take(2 * page());
  Rank& rank = ranks_[0];
  fill(rank.block.first(page()), 3);
  fill({rank.storage->common(rank.block.data() + page()), page()}, 4);
  rank.storage.reset();
  EXPECT_TRUE(all(rank.block.first(page()), 3));
  EXPECT_TRUE(all(rank.block.subspan(page()), 4));
  rank.arena->deallocate(rank.block.data(), rank.block.size());
}

TEST_F(SharedHostStorageTest, ChildrenDoNotGetThemUnlessTheyAreGiven) {
  take(page());
  const auto child_has = [&] {
    return testing::in_forked_child(
               [&] { return testing::is_mapped(ranks_[0].block.data(), page()) ? 1 : 0; }) == 1;
  };
  if (testing::kMappingsTell) {
    EXPECT_FALSE(child_has());
  }
  ranks_[0].storage->begin_copy(ranks_[0].block);
  if (testing::kMappingsTell) {
    EXPECT_FALSE(child_has());
  }
  ranks_[0].arena->share_with_children(ranks_[0].block.data(), ranks_[0].block.size());
  EXPECT_TRUE(child_has());
  ranks_[0].storage->forget(ranks_[0].block);
  EXPECT_TRUE(child_has());
  ranks_[0].storage->begin_copy(ranks_[0].block);
  EXPECT_TRUE(child_has());
}

TEST(SharedHostStorageErrorTest, AFileThatCannotBeMappedIsNamed) {
  try {
    const SharedHostStorage storage(-1, system_page_sizes().page);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("mapping the ranks' host storage failed"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace castor
