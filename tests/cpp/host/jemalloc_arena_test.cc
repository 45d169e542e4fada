#include "host/page_source.h"

#include <gtest/gtest.h>

#if defined(CASTOR_HAVE_JEMALLOC)

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "host/adversary_pages.h"
#include "host/jemalloc_arena.h"
#include "host/residency.h"

namespace castor {
namespace {

using testing::AdversaryPages;
using testing::PageControls;
using testing::resident_bytes;

TEST(JemallocArenaTest, TheExcessOfASizeClassIsAddressSpaceOnly) {
  const std::size_t page = system_page_sizes().page;
  JemallocArena arena;
  std::size_t largest_excess = 0;
  for (const std::size_t bytes : {8 * kMiB + 1, 17 * kMiB, 33 * kMiB + 64, 64 * kMiB + 1}) {
    const std::size_t before = arena.mapped_bytes();
    std::byte* const data = arena.allocate(bytes);
    const std::size_t mapped = arena.mapped_bytes() - before;
    std::memset(data, 1, bytes);
    EXPECT_EQ(resident_bytes(data, mapped), align_up(bytes, page)) << bytes;
    largest_excess = std::max(largest_excess, mapped - bytes);
    EXPECT_LE(mapped, bytes + bytes / 4 + page);
    arena.deallocate(data, bytes);
  }
  EXPECT_GT(largest_excess, 2 * kMiB) << "no size tested has an excess worth the test";
}

TEST(JemallocArenaTest, FreedExtentsAreUnmappedAtOnce) {
  JemallocArena arena;
  const std::size_t idle = arena.mapped_bytes();
  for (const std::size_t bytes : {4 * kMiB, 48 * kMiB + 1}) {
    std::byte* const data = arena.allocate(bytes);
    std::memset(data, 1, bytes);
    arena.deallocate(data, bytes);
    EXPECT_EQ(arena.mapped_bytes(), idle) << bytes;
    EXPECT_EQ(resident_bytes(data, bytes), 0U) << bytes;
  }
}

TEST(JemallocArenaTest, SmallBlocksLeaveNothingBehind) {
  JemallocArena arena;
  const std::size_t idle = arena.mapped_bytes();
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 5000; ++i) {
    blocks.push_back(arena.allocate(1000));
  }
  for (std::byte* const block : blocks) {
    arena.deallocate(block, 1000);
  }
  EXPECT_EQ(arena.mapped_bytes(), idle);
}

TEST(JemallocArenaTest, DestroyedArenasGiveEverythingBackAndTheirIndexIsReused) {
  const auto controls = std::make_shared<PageControls>();
  // More arenas than jemalloc has indices (4095): each must free its own.
  for (int i = 0; i < 5000; ++i) {
    JemallocArena arena(std::make_unique<AdversaryPages>(controls));
    std::byte* const data = arena.allocate(100 * kKiB);
    data[0] = std::byte{1};
    arena.deallocate(data, 100 * kKiB);
  }
  EXPECT_EQ(controls->live_bytes, 0U);
}

TEST(JemallocArenaTest, ARefusedFirstMappingThrows) {
  const auto controls = std::make_shared<PageControls>();
  controls->limit_bytes = 0;
  EXPECT_THROW(JemallocArena(std::make_unique<AdversaryPages>(controls)), Error);
  EXPECT_EQ(controls->live_bytes, 0U);
}

}  // namespace
}  // namespace castor

#else

TEST(JemallocArenaTest, IsPartOfThisBuild) {
  GTEST_SKIP() << "built without jemalloc (CASTOR_JEMALLOC_ROOT)";
}

#endif
