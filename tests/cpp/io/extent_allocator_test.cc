#include "io/extent_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "core/error.h"

namespace castor {
namespace {

TEST(ExtentAllocatorTest, ExactFitTakesEverything) {
  ExtentAllocator allocator(8192, 4096);
  const auto all = allocator.try_allocate(8192);
  ASSERT_TRUE(all);
  EXPECT_EQ(*all, (Extent{0, 8192}));
  EXPECT_FALSE(allocator.try_allocate(1));
  allocator.free(*all);
  EXPECT_EQ(allocator.largest_free(), 8192U);
  EXPECT_EQ(allocator.peak_bytes(), 8192U);
}

TEST(ExtentAllocatorTest, SizesAreRoundedUpAndTheCapacityDown) {
  ExtentAllocator allocator(3 * 4096 + 17, 4096);
  EXPECT_EQ(allocator.capacity(), 3U * 4096);
  EXPECT_EQ(allocator.try_allocate(1), (Extent{0, 4096}));
  EXPECT_EQ(allocator.try_allocate(4097), (Extent{4096, 8192}));
  EXPECT_EQ(allocator.used_bytes(), 3U * 4096);
}

TEST(ExtentAllocatorTest, TheTightestRangeIsTakenAndTheLowestAmongEquals) {
  ExtentAllocator allocator(100, 1);
  const auto a = allocator.try_allocate(30);
  const auto b = allocator.try_allocate(10);
  const auto c = allocator.try_allocate(20);
  const auto d = allocator.try_allocate(10);
  const auto e = allocator.try_allocate(20);
  ASSERT_TRUE(a && b && c && d && e);  // 10 bytes are left at 90
  allocator.free(*a);
  allocator.free(*c);
  allocator.free(*e);                                       // 20 at 70 joins the 10 at 90
  EXPECT_EQ(allocator.try_allocate(20), (Extent{40, 20}));  // the hole of c: an exact fit
  EXPECT_EQ(allocator.try_allocate(30), (Extent{0, 30}));
}

TEST(ExtentAllocatorTest, NeighboursCoalesceInEveryOrder) {
  const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    ExtentAllocator allocator(30, 1);
    const std::optional<Extent> extents[] = {allocator.try_allocate(10), allocator.try_allocate(10),
                                             allocator.try_allocate(10)};
    for (const int i : order) {
      allocator.free(*extents[i]);
    }
    EXPECT_EQ(allocator.num_free_ranges(), 1U);
    EXPECT_EQ(allocator.largest_free(), 30U);
  }
}

TEST(ExtentAllocatorTest, WhatIsNotAllocatedIsNotFreed) {
  ExtentAllocator allocator(100, 1);
  const auto extent = allocator.try_allocate(10);
  ASSERT_TRUE(extent);
  EXPECT_THROW(allocator.free({extent->offset, 9}), InvalidArgument);
  EXPECT_THROW(allocator.free({extent->offset + 1, 9}), InvalidArgument);
  allocator.free(*extent);
  EXPECT_THROW(allocator.free(*extent), InvalidArgument);
  EXPECT_EQ(allocator.used_bytes(), 0U);
}

TEST(ExtentAllocatorTest, NonsenseIsRefused) {
  EXPECT_THROW(ExtentAllocator(100, 0), InvalidArgument);
  ExtentAllocator allocator(100, 1);
  EXPECT_THROW((void)allocator.try_allocate(0), InvalidArgument);
  EXPECT_FALSE(allocator.try_allocate(std::uint64_t{0} - 1));  // rounding must not wrap
  EXPECT_FALSE(ExtentAllocator(10, 4096).try_allocate(1));     // no whole block
}

// Free and allocated extents partition the space after every operation: checked against a model
// that is a map of what was given, and in whole every 10,000 operations.
TEST(ExtentAllocatorTest, AMillionRandomOperationsLeakAndOverlapNothing) {
  constexpr std::uint64_t kAlignment = 512;
  constexpr std::uint64_t kCapacity = 4096 * kAlignment;
  ExtentAllocator allocator(kCapacity, kAlignment);
  std::mt19937_64 generator(20240611);
  std::map<std::uint64_t, std::uint64_t> model;  // offset -> bytes
  std::vector<Extent> live;
  std::uint64_t used = 0;
  std::size_t num_refused = 0;
  for (int operation = 0; operation < 1'000'000; ++operation) {
    // Phases of growth and of shrinking, so that the space is full and empty again and again.
    const bool grows = operation / 5000 % 2 == 0;
    if (live.empty() || generator() % 10 < (grows ? 7U : 3U)) {
      const std::uint64_t wanted = 1 + generator() % (generator() % 8 == 0 ? 300'000 : 5'000);
      const auto extent = allocator.try_allocate(wanted);
      if (!extent) {
        ++num_refused;
        ASSERT_LT(allocator.largest_free(), wanted);
        continue;
      }
      ASSERT_GE(extent->bytes, wanted);
      ASSERT_LT(extent->bytes, wanted + kAlignment);
      ASSERT_EQ(extent->offset % kAlignment, 0U);
      ASSERT_LE(extent->end(), kCapacity);
      const auto [place, inserted] = model.emplace(extent->offset, extent->bytes);
      ASSERT_TRUE(inserted);
      ASSERT_TRUE(std::next(place) == model.end() || std::next(place)->first >= extent->end());
      if (place != model.begin()) {
        const auto before = std::prev(place);
        ASSERT_LE(before->first + before->second, extent->offset);
      }
      live.push_back(*extent);
      used += extent->bytes;
    } else {
      std::swap(live[generator() % live.size()], live.back());
      allocator.free(live.back());
      model.erase(live.back().offset);
      used -= live.back().bytes;
      live.pop_back();
    }
    ASSERT_EQ(allocator.used_bytes(), used);
    if (operation % 10'000 == 0) {
      std::uint64_t gaps = 0;
      std::uint64_t largest = 0;
      std::uint64_t end = 0;
      for (const auto& [offset, bytes] : model) {
        gaps += offset > end ? 1 : 0;
        largest = std::max(largest, offset - end);
        end = offset + bytes;
      }
      gaps += end < kCapacity ? 1 : 0;
      largest = std::max(largest, kCapacity - end);
      ASSERT_EQ(allocator.num_free_ranges(), gaps);
      ASSERT_EQ(allocator.largest_free(), largest);
    }
  }
  EXPECT_GT(num_refused, 1000U);  // it was full often enough
  for (const Extent& extent : live) {
    allocator.free(extent);
  }
  EXPECT_EQ(allocator.used_bytes(), 0U);
  EXPECT_EQ(allocator.num_free_ranges(), 1U);
  EXPECT_EQ(allocator.largest_free(), kCapacity);
}

}  // namespace
}  // namespace castor
