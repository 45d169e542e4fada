#include "host/mmap_arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/units.h"
#include "host/adversary_pages.h"
#include "host/residency.h"

namespace castor {
namespace {

TEST(MmapArenaTest, MapsWholePagesAndUnmapsAtOnce) {
  const std::size_t page = system_page_sizes().page;
  MmapArena arena;
  std::byte* const small = arena.allocate(1);
  EXPECT_EQ(arena.mapped_bytes(), page);
  std::byte* const large = arena.allocate(2 * kMiB + 1);
  EXPECT_EQ(arena.mapped_bytes(), page + 2 * kMiB + page);
  std::memset(large, 1, 2 * kMiB + 1);
  arena.deallocate(large, 2 * kMiB + 1);
  EXPECT_EQ(testing::resident_bytes(large, 2 * kMiB + page), 0U);
  arena.deallocate(small, 1);
  EXPECT_EQ(arena.mapped_bytes(), 0U);
}

TEST(MmapArenaTest, WhatIsDiscardedWhereNeededIsUsedAgain) {
  MmapArena arena(std::make_unique<OsPages>(OsPages::Discard::kWhereNeeded));
  for (const std::size_t bytes : {std::size_t{1}, 100 * kKiB, 5 * kMiB + 1}) {
    std::byte* const data = arena.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % system_page_sizes().page, 0U);
    for (int use = 1; use <= 3; ++use) {
      std::memset(data, use, bytes);
      EXPECT_EQ(data[bytes - 1], std::byte(use));
      arena.discard(data, bytes);
    }
    arena.deallocate(data, bytes);
  }
  EXPECT_THROW(static_cast<void>(arena.allocate(std::size_t{1} << 60)), OutOfMemory);
  EXPECT_EQ(arena.description().find("refused"), std::string::npos) << "of the discards";
}

TEST(MmapArenaTest, DiscardGivesThePhysicalMemoryBackAndKeepsTheBlock) {
  const std::size_t page = system_page_sizes().page;
  MmapArena arena;
  std::byte* const data = arena.allocate(2 * kMiB + 1);
  std::memset(data, 1, 2 * kMiB + 1);
  arena.discard(data, 2 * kMiB + 1);
  EXPECT_EQ(testing::resident_bytes(data, 2 * kMiB), 0U);
  EXPECT_EQ(arena.mapped_bytes(), 2 * kMiB + page);
  std::memset(data, 2, 2 * kMiB + 1);
  EXPECT_EQ(data[2 * kMiB], std::byte{2});
  arena.deallocate(data, 2 * kMiB + 1);
}

TEST(OsPagesTest, MakesResidentAllThatItIsAskedFor) {
  const std::size_t page = system_page_sizes().page;
  const std::size_t bytes = 160 * kMiB + 3 * page;  // pieces of several threads, and a rest
  OsPages pages;
  std::byte* const data = pages.map(bytes + page, page);
  ASSERT_NE(data, nullptr);
  ASSERT_EQ(testing::resident_bytes(data, bytes + page), 0u);
  pages.make_resident(data, bytes);
  if (std::thread::hardware_concurrency() > 1) {
    EXPECT_GE(testing::resident_bytes(data, bytes), bytes);
  }
  EXPECT_EQ(data[0], std::byte{0});
  EXPECT_EQ(data[bytes - 1], std::byte{0});
  ASSERT_EQ(::mprotect(data, bytes, PROT_NONE), 0);
  pages.make_resident(data, bytes);  // refused, and no harm
  EXPECT_TRUE(pages.unmap(data, bytes + page));
}

TEST(MmapArenaTest, AlignmentSlackIsReturned) {
  const auto controls = std::make_shared<testing::PageControls>();
  testing::AdversaryPages pages(controls);
  std::byte* const data = pages.map(2 * kMiB, 8 * kMiB);
  ASSERT_NE(data, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % (8 * kMiB), 0U);
  unsigned char state = 0;
  const std::size_t page = system_page_sizes().page;
  EXPECT_EQ(::mincore(data, page, &state), 0);
  EXPECT_TRUE(pages.unmap(data, 2 * kMiB));
  EXPECT_EQ(::mincore(data, page, &state), -1);
}

TEST(MmapArenaTest, ARefusalShowsInTheDescription) {
  OsPages pages;
  EXPECT_EQ(pages.description().find("refused"), std::string::npos);
  const std::size_t page = system_page_sizes().page;
  std::byte* const data = pages.map(2 * page, page);
  ASSERT_NE(data, nullptr);
  EXPECT_FALSE(pages.unmap(data + 1, page));  // not a page boundary: EINVAL
  EXPECT_NE(pages.description().find("1 call(s) refused (last: Invalid argument)"),
            std::string::npos)
      << pages.description();
  EXPECT_TRUE(pages.unmap(data, 2 * page));
}

TEST(MmapArenaTest, DescriptionSaysWhatItIs) {
  EXPECT_EQ(MmapArena().description().rfind("mmap arena over mmap, ", 0), 0U)
      << MmapArena().description();
}

}  // namespace
}  // namespace castor
