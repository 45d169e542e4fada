// One suite for every arena of the host layer: each meets the same contract and the same
// adversaries.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/memory_tier.h"
#include "core/units.h"
#include "host/adversary_pages.h"
#include "host/forks.h"
#include "host/mmap_arena.h"
#include "host/residency.h"
#include "host/slot_arena.h"

#if defined(CASTOR_HAVE_JEMALLOC)
#include "host/jemalloc_arena.h"
#endif

namespace castor {
namespace {

using testing::AdversaryPages;
using testing::in_forked_child;
using testing::is_mapped;
using testing::PageControls;
using testing::process_resident_bytes;
using testing::resident_bytes;

struct ArenaKind {
  const char* name;
  std::unique_ptr<Arena> (*make)(std::unique_ptr<PageSource>);
};

std::unique_ptr<Arena> make_mmap(std::unique_ptr<PageSource> pages) {
  return std::make_unique<MmapArena>(std::move(pages));
}
std::unique_ptr<Arena> make_slot_over_mmap(std::unique_ptr<PageSource> pages) {
  return std::make_unique<SlotArena>(make_mmap(std::move(pages)), TierKind::kHost);
}
#if defined(CASTOR_HAVE_JEMALLOC)
std::unique_ptr<Arena> make_jemalloc(std::unique_ptr<PageSource> pages) {
  return std::make_unique<JemallocArena>(std::move(pages));
}
std::unique_ptr<Arena> make_slot_over_jemalloc(std::unique_ptr<PageSource> pages) {
  return std::make_unique<SlotArena>(make_jemalloc(std::move(pages)), TierKind::kHost);
}
#endif

constexpr ArenaKind kHostStorageKinds[] = {
    {"Mmap", make_mmap},
#if defined(CASTOR_HAVE_JEMALLOC)
    {"Jemalloc", make_jemalloc},
#endif
};
constexpr ArenaKind kKindsOfSlots[] = {
    {"SlotOverMmap", make_slot_over_mmap},
#if defined(CASTOR_HAVE_JEMALLOC)
    {"SlotOverJemalloc", make_slot_over_jemalloc},
#endif
};

constexpr std::array<std::size_t, 12> kSizes = {
    1,        63,           64,       4095,           4096,      4097,
    kMiB + 1, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 100, 10 * kMiB, 33 * kMiB + 12345};

class ArenaTest : public ::testing::TestWithParam<ArenaKind> {
 protected:
  std::unique_ptr<Arena> make() const {
    return GetParam().make(std::make_unique<AdversaryPages>(controls_));
  }

  std::shared_ptr<PageControls> controls_ = std::make_shared<PageControls>();
};

TEST_P(ArenaTest, BlocksAreAlignedWritableAndDisjoint) {
  const auto arena = make();
  std::vector<std::pair<std::byte*, std::size_t>> blocks;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    std::byte* const data = arena->allocate(kSizes[i]);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % kParamAlignment, 0U) << kSizes[i];
    std::memset(data, static_cast<int>(i + 1), kSizes[i]);
    blocks.emplace_back(data, kSizes[i]);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto [data, bytes] = blocks[i];
    EXPECT_TRUE(std::all_of(data, data + bytes, [&](std::byte b) { return b == std::byte(i + 1); }))
        << bytes;
    arena->deallocate(data, bytes);
  }
}

TEST_P(ArenaTest, DiscardedBlocksStayUsableAndTheirNeighboursKeepTheirBytes) {
  const auto arena = make();
  std::vector<std::pair<std::byte*, std::size_t>> blocks;
  for (const std::size_t bytes : kSizes) {
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back(arena->allocate(bytes), bytes);
      std::memset(blocks.back().first, 7, bytes);
    }
  }
  for (std::size_t i = 1; i < blocks.size(); i += 3) {
    arena->discard(blocks[i].first, blocks[i].second);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto [data, bytes] = blocks[i];
    if (i % 3 == 1) {
      std::memset(data, 7, bytes);
    }
    EXPECT_TRUE(std::all_of(data, data + bytes, [](std::byte b) { return b == std::byte{7}; }))
        << bytes;
    arena->deallocate(data, bytes);
  }
}

TEST_P(ArenaTest, BlocksOfAHugePageStartOnAHugePage) {
  const std::size_t huge = system_page_sizes().huge;
  if (huge == 0) {
    GTEST_SKIP() << "this kernel has no transparent huge pages";
  }
  const auto arena = make();
  for (const std::size_t bytes : {huge, huge + 1, 5 * huge - 64}) {
    std::byte* const small = arena->allocate(4096);  // keeps addresses from being aligned by luck
    std::byte* const data = arena->allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % huge, 0U) << bytes;
    arena->deallocate(data, bytes);
    arena->deallocate(small, 4096);
  }
}

TEST_P(ArenaTest, ForkedChildrenGetNoWholePageOfABlock) {
  if (!testing::kMappingsTell) {
    GTEST_SKIP() << "a sanitizer maps memory of its own";
  }
  const std::size_t page = system_page_sizes().page;
  const auto arena = make();
  for (const std::size_t bytes : {page, 5 * page + 100, 4 * kMiB, 4 * kMiB + 100}) {
    std::byte* const data = arena->allocate(bytes);
    std::memset(data, 7, bytes);
    std::byte* const first = data + (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
    const std::size_t whole = static_cast<std::size_t>(data + bytes - first) / page;
    const int mapped = in_forked_child([&] {
      int count = 0;
      for (std::size_t i = 0; i < std::min<std::size_t>(whole, 50); ++i) {
        count += is_mapped(first + i * page, page) ? 1 : 0;
      }
      return count;
    });
    EXPECT_EQ(mapped, 0) << bytes;
    EXPECT_TRUE(std::all_of(data, data + bytes, [](std::byte b) { return b == std::byte{7}; }));
    arena->deallocate(data, bytes);
  }
}

TEST_P(ArenaTest, AChildNeitherLosesNorGivesBackWhatItDoesNotHave) {
  if (!testing::kMappingsTell) {
    GTEST_SKIP() << "a sanitizer maps memory of its own";
  }
  const std::size_t bytes = 4 * kMiB;
  const auto arena = make();
  std::byte* const data = arena->allocate(bytes);
  const int lost = in_forked_child([&] {
    void* const own = ::mmap(data, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != data) {
      return 1;  // it was inherited
    }
    data[0] = std::byte{9};
    arena->deallocate(data, bytes);
    arena->discard(data, bytes);
    return data[0] == std::byte{9} ? 0 : 2;
  });
  EXPECT_EQ(lost, 0);
  arena->deallocate(data, bytes);
}

/// Those whose blocks are host storage. Slots are never shared.
class SharingArenaTest : public ArenaTest {};

TEST_P(SharingArenaTest, ASharedBlockIsInherited) {
  const std::size_t bytes = 4 * kMiB;
  const auto arena = GetParam().make(std::make_unique<OsPages>());
  std::byte* const data = arena->allocate(bytes);
  data[bytes - 1] = std::byte{3};
  arena->share_with_children(data, bytes);
  EXPECT_EQ(in_forked_child([&] { return std::to_integer<int>(data[bytes - 1]); }), 3);
  arena->deallocate(data, bytes);
}

TEST_P(ArenaTest, ZeroBytesAreRefusedAsAnArgument) {
  const auto arena = make();
  EXPECT_THROW((void)arena->allocate(0), InvalidArgument);
}

TEST_P(ArenaTest, AbsurdSizesAreOutOfMemory) {
  const auto arena = make();
  for (const std::size_t bytes : {SIZE_MAX, SIZE_MAX - 4096, SIZE_MAX / 2, SIZE_MAX / 2 + 1}) {
    try {
      (void)arena->allocate(bytes);
      FAIL() << bytes << " bytes were granted";
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(error.requested(), bytes);
    }
  }
  std::byte* const data = arena->allocate(64);
  arena->deallocate(data, 64);
}

TEST_P(ArenaTest, UntouchedBlocksTakeNoMemory) {
  const auto arena = make();
  const std::size_t bytes = 64 * kMiB;
  std::byte* const data = arena->allocate(bytes);
  EXPECT_EQ(resident_bytes(data, bytes), 0U);
  arena->deallocate(data, bytes);
}

TEST_P(ArenaTest, TouchedBlocksTakeTheirSizeAndNotMore) {
  const PageSizes sizes = system_page_sizes();
  const auto arena = make();
  for (const std::size_t bytes : {2 * kMiB, 2 * kMiB + 1, 10 * kMiB + 100, 33 * kMiB - 4096}) {
    // An untouched neighbour on each side: what becomes resident of it was touched by the middle.
    std::byte* const before = arena->allocate(bytes);
    std::byte* const data = arena->allocate(bytes);
    std::byte* const after = arena->allocate(bytes);
    std::memset(data, 1, bytes);
    const std::size_t expected = align_up(bytes, sizes.page);
    EXPECT_EQ(resident_bytes(data, bytes), expected) << bytes;
    for (std::byte* const neighbour : {before, after}) {
      EXPECT_EQ(resident_bytes(neighbour, bytes), 0U) << bytes;
    }
    for (std::byte* const block : {before, data, after}) {
      arena->deallocate(block, bytes);
    }
  }
}

#if !defined(__SANITIZE_THREAD__)  // its shadow memory counts as resident
TEST_P(ArenaTest, ADestroyedArenaLeavesNothingResident) {
  constexpr std::size_t kBytes = 24 * kMiB + 4097;
  constexpr std::size_t kNoise = kMiB;  // the allocator and the test framework of the process
  const std::size_t before = process_resident_bytes();
  {
    const auto arena = make();
    std::vector<std::byte*> blocks;
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(arena->allocate(kBytes));
      std::memset(blocks.back(), 1, kBytes);
    }
    const std::size_t during = process_resident_bytes();
    EXPECT_GE(during, before + 4 * kBytes);
    EXPECT_LE(during, before + 4 * (kBytes + 2 * kMiB));
    for (std::byte* const block : blocks) {
      arena->deallocate(block, kBytes);
    }
  }
  EXPECT_LE(process_resident_bytes(), before + kNoise);
  EXPECT_EQ(controls_->live_bytes, 0U);
}
#endif

TEST_P(ArenaTest, ExhaustionThrowsAndFreedMemoryServesAgain) {
  const auto arena = make();
  constexpr std::size_t kBytes = 8 * kMiB;
  controls_->limit_bytes = controls_->live_bytes + 8 * kBytes;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::byte*> blocks;
    try {
      for (;;) {
        blocks.push_back(arena->allocate(kBytes));
      }
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(error.tier(), TierKind::kHost);
      EXPECT_EQ(error.requested(), kBytes);
    }
    EXPECT_EQ(blocks.size(), 8U) << "round " << round;
    for (std::byte* const block : blocks) {
      arena->deallocate(block, kBytes);
    }
  }
}

TEST_P(ArenaTest, ARefusalAtAnyCallLeavesTheArenaUsableAndLeaksNothing) {
  constexpr std::size_t kBytes = 4 * kMiB;
  std::size_t num_refused = 0;
  for (std::size_t call = 1; call <= 8; ++call) {
    controls_ = std::make_shared<PageControls>();
    controls_->refuse_map_call = call;
    try {
      const auto arena = make();  // jemalloc maps already here
      std::vector<std::byte*> blocks;
      for (int i = 0; i < 4; ++i) {
        try {
          blocks.push_back(arena->allocate(kBytes));
        } catch (const OutOfMemory& error) {
          EXPECT_EQ(error.requested(), kBytes);
          ++num_refused;
          blocks.push_back(arena->allocate(kBytes));
        }
        std::memset(blocks.back(), 1, kBytes);
      }
      for (std::byte* const block : blocks) {
        arena->deallocate(block, kBytes);
      }
    } catch (const Error&) {
      ++num_refused;
    }
    EXPECT_EQ(controls_->live_bytes, 0U) << "refused at call " << call;
  }
  EXPECT_GE(num_refused, 4U);
}

TEST_P(ArenaTest, ARefusedUnmapGivesTheMemoryBackAllTheSame) {
  constexpr std::size_t kBytes = 4 * kMiB;
  auto arena = make();
  std::byte* const data = arena->allocate(kBytes);
  std::memset(data, 1, kBytes);
  controls_->refuse_unmap = true;
  arena->deallocate(data, kBytes);
  if (auto* const slots = dynamic_cast<SlotArena*>(arena.get())) {
    slots->trim(0, 0);
    EXPECT_EQ(slots->free_bytes(), 0U);
  }
  EXPECT_EQ(resident_bytes(data, kBytes), 0U);
  EXPECT_GE(controls_->num_discards, 1U);
  arena.reset();
}

TEST_P(ArenaTest, TheBudgetOfATierIsExact) {
  MemoryTier tier(TierKind::kHost, 10 * kMiB, make());
  {
    const Block first = tier.allocate(6 * kMiB, "lower it");
    try {
      (void)tier.allocate(5 * kMiB, "lower the batch size");
      FAIL() << "the budget was passed";
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(error.tier(), TierKind::kHost);
      EXPECT_EQ(error.requested(), 5 * kMiB);
      EXPECT_EQ(error.available(), 4 * kMiB);
      EXPECT_EQ(error.budget(), 10 * kMiB);
      EXPECT_NE(std::string(error.what()).find("lower the batch size"), std::string::npos);
    }
    const Block second = tier.allocate(4 * kMiB, "");
    EXPECT_EQ(tier.ledger().available(), 0U);
    EXPECT_FALSE(tier.allocate(0, ""));
    EXPECT_THROW((void)tier.allocate(1, ""), OutOfMemory);
  }
  EXPECT_EQ(tier.ledger().used(), 0U);
  EXPECT_EQ(tier.ledger().peak(), 10 * kMiB);
}

TEST_P(ArenaTest, ARefusalByTheSystemGivesTheReservationBack) {
  MemoryTier tier(TierKind::kHost, kGiB, make());
  controls_->limit_bytes = controls_->live_bytes.load();
  EXPECT_THROW((void)tier.allocate(16 * kMiB, ""), OutOfMemory);
  EXPECT_EQ(tier.ledger().used(), 0U);
}

TEST_P(ArenaTest, ConcurrentHammerKeepsBlocksApartAndBytesCounted) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 400;
  constexpr std::size_t kBudget = 16 * kMiB;
  MemoryTier tier(TierKind::kHost, kBudget, make());
  std::atomic<std::size_t> num_allocated{0};
  std::atomic<std::size_t> num_refused{0};
  std::atomic<std::size_t> num_torn{0};
  const auto hammer = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<Block> blocks;
    const auto stamp = std::byte(seed + 1);
    const auto release = [&](Block& block) {
      const std::byte* const data = block.data();
      if (data[0] != stamp || data[block.bytes() / 2] != stamp ||
          data[block.bytes() - 1] != stamp) {
        ++num_torn;
      }
    };
    for (int round = 0; round < kRounds; ++round) {
      if (blocks.size() > 4 || (!blocks.empty() && random() % 3 == 0)) {
        const std::size_t i = random() % blocks.size();
        release(blocks[i]);
        std::swap(blocks[i], blocks.back());
        blocks.pop_back();
        continue;
      }
      try {
        Block block = tier.allocate(kSizes[random() % 11], "");
        for (std::size_t offset = 0; offset < block.bytes(); offset += 4096) {
          block.data()[offset] = stamp;
        }
        block.data()[block.bytes() / 2] = stamp;
        block.data()[block.bytes() - 1] = stamp;
        blocks.push_back(std::move(block));
        ++num_allocated;
      } catch (const OutOfMemory&) {
        ++num_refused;
      }
    }
    for (Block& block : blocks) {
      release(block);
    }
  };
  {
    std::vector<std::jthread> threads;
    for (unsigned i = 0; i < kThreads; ++i) {
      threads.emplace_back(hammer, i);
    }
  }
  EXPECT_EQ(num_torn, 0U);
  EXPECT_GT(num_allocated, 0U);
  EXPECT_GT(num_refused, 0U);
  EXPECT_LE(tier.ledger().peak(), kBudget);
  EXPECT_EQ(tier.ledger().used(), 0U);
}

std::string name_of(const ::testing::TestParamInfo<ArenaKind>& instance) {
  return instance.param.name;
}

INSTANTIATE_TEST_SUITE_P(HostStorage, ArenaTest, ::testing::ValuesIn(kHostStorageKinds), name_of);
INSTANTIATE_TEST_SUITE_P(HostStorage, SharingArenaTest, ::testing::ValuesIn(kHostStorageKinds),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Slots, ArenaTest, ::testing::ValuesIn(kKindsOfSlots), name_of);

}  // namespace
}  // namespace castor
