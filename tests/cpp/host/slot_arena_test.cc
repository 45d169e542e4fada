#include "host/slot_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "host/mmap_arena.h"

namespace castor {
namespace {

/// What reached the arena below the slots.
struct Traffic {
  std::atomic<std::size_t> num_allocations{0};
  std::atomic<std::size_t> num_deallocations{0};
  std::atomic<bool> refuse{false};
};

class RecordingArena final : public Arena {
 public:
  explicit RecordingArena(std::shared_ptr<Traffic> traffic) : traffic_(std::move(traffic)) {}

  std::byte* allocate(std::size_t bytes) override {
    if (traffic_->refuse) {
      throw OutOfMemory(TierKind::kHost, bytes, 11, 22, "upstream refused");
    }
    ++traffic_->num_allocations;
    return arena_.allocate(bytes);
  }
  void deallocate(std::byte* data, std::size_t bytes) noexcept override {
    ++traffic_->num_deallocations;
    arena_.deallocate(data, bytes);
  }
  std::string description() const override { return "recording"; }

 private:
  MmapArena arena_;
  const std::shared_ptr<Traffic> traffic_;
};

class SlotArenaTest : public ::testing::Test {
 protected:
  const std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
  SlotArena arena_{std::make_unique<RecordingArena>(traffic_)};
};

TEST_F(SlotArenaTest, AFreedSlotStaysReadableUntilItIsReused) {
  constexpr std::size_t kBytes = 2 * kMiB;
  std::byte* const data = arena_.allocate(kBytes);
  std::memset(data, 0x5a, kBytes);
  arena_.deallocate(data, kBytes);
  std::byte* const other = arena_.allocate(kMiB);  // traffic of another size does not touch it
  std::memset(other, 0, kMiB);
  EXPECT_EQ(traffic_->num_deallocations, 0U);
  EXPECT_TRUE(std::all_of(data, data + kBytes, [](std::byte b) { return b == std::byte{0x5a}; }));
  EXPECT_EQ(arena_.allocate(kBytes), data);
  EXPECT_EQ(data[kBytes - 1], std::byte{0x5a}) << "reuse does not clear either";
  arena_.deallocate(data, kBytes);
  arena_.deallocate(other, kMiB);
}

TEST_F(SlotArenaTest, SlotsAreReusedForTheirExactSizeOnlyAndLastFreedFirst) {
  std::byte* const a = arena_.allocate(kMiB);
  std::byte* const b = arena_.allocate(kMiB);
  arena_.deallocate(a, kMiB);
  arena_.deallocate(b, kMiB);
  EXPECT_EQ(arena_.free_bytes(), 2 * kMiB);
  std::byte* const c = arena_.allocate(kMiB - 64);
  EXPECT_NE(c, a);
  EXPECT_NE(c, b);
  EXPECT_EQ(arena_.allocate(kMiB), b);
  EXPECT_EQ(arena_.allocate(kMiB), a);
  EXPECT_EQ(traffic_->num_allocations, 3U);
  EXPECT_EQ(arena_.free_bytes(), 0U);
  arena_.deallocate(a, kMiB);
  arena_.deallocate(b, kMiB);
  arena_.deallocate(c, kMiB - 64);
}

TEST_F(SlotArenaTest, TrimReturnsFreeSlotsAndOnlyThose) {
  std::byte* const live = arena_.allocate(kMiB);
  std::byte* const freed = arena_.allocate(kMiB);
  std::memset(live, 7, kMiB);
  arena_.deallocate(freed, kMiB);
  arena_.trim(0, 0);
  EXPECT_EQ(arena_.free_bytes(), 0U);
  arena_.trim(0, 0);
  EXPECT_EQ(traffic_->num_deallocations, 1U);
  EXPECT_EQ(live[kMiB - 1], std::byte{7});
  arena_.deallocate(live, kMiB);
  EXPECT_EQ(arena_.free_bytes(), kMiB);
}

TEST_F(SlotArenaTest, TrimKeepsWhatFitsBesideTheNextSlot) {
  std::byte* const small = arena_.allocate(kMiB);
  std::byte* const other = arena_.allocate(kMiB);
  std::byte* const large = arena_.allocate(3 * kMiB);
  arena_.deallocate(small, kMiB);
  arena_.deallocate(other, kMiB);
  arena_.deallocate(large, 3 * kMiB);
  arena_.trim(2 * kMiB, 3 * kMiB);  // the large one serves the next request
  EXPECT_EQ(arena_.free_bytes(), 5 * kMiB);
  arena_.trim(2 * kMiB, 5 * kMiB);
  EXPECT_EQ(arena_.free_bytes(), 2 * kMiB);
  arena_.trim(kMiB, 7 * kMiB);
  EXPECT_EQ(arena_.free_bytes(), kMiB);
  EXPECT_EQ(arena_.allocate(kMiB), other) << "the slot freed first goes first";
  arena_.deallocate(other, kMiB);
}

TEST_F(SlotArenaTest, ATiersFreeSlotsStayWithinItsBudget) {
  auto arena = std::make_unique<SlotArena>(std::make_unique<RecordingArena>(traffic_));
  const SlotArena& slots = *arena;
  MemoryTier budgeted(TierKind::kDevice, 4 * kMiB, std::move(arena));
  for (const std::size_t bytes : {kMiB, 3 * kMiB, 2 * kMiB, 3 * kMiB, kMiB, 4 * kMiB}) {
    const Block block = budgeted.allocate(bytes, "");
    EXPECT_LE(bytes + slots.free_bytes(), 4 * kMiB);
  }
}

TEST_F(SlotArenaTest, DestructionReturnsEverySlot) {
  {
    SlotArena arena(std::make_unique<RecordingArena>(traffic_));
    for (const std::size_t bytes : {kMiB, 2 * kMiB, 3 * kMiB}) {
      arena.deallocate(arena.allocate(bytes), bytes);
    }
    EXPECT_EQ(traffic_->num_deallocations, 0U);
  }
  EXPECT_EQ(traffic_->num_deallocations, 3U);
}

TEST_F(SlotArenaTest, OutOfMemoryNamesTheTierAndWhatFreeSlotsHold) {
  std::byte* const data = arena_.allocate(3 * kMiB);
  arena_.deallocate(data, 3 * kMiB);
  traffic_->refuse = true;
  try {
    (void)arena_.allocate(kMiB);
    FAIL() << "upstream refused, the slot arena did not";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.tier(), TierKind::kDevice);
    EXPECT_EQ(error.requested(), kMiB);
    EXPECT_EQ(error.available(), 11U);
    EXPECT_EQ(error.budget(), 22U);
    EXPECT_NE(std::string(error.what()).find("upstream refused"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(format_bytes(3 * kMiB)), std::string::npos);
  }
  EXPECT_EQ(traffic_->num_deallocations, 0U) << "running out must not drop a readable slot";
  EXPECT_EQ(arena_.allocate(3 * kMiB), data) << "a free slot serves without upstream";
  arena_.deallocate(data, 3 * kMiB);
}

TEST_F(SlotArenaTest, ConcurrentHammerWithTrimLosesNoBlock) {
  std::atomic<std::size_t> num_served{0};
  {
    std::vector<std::jthread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 random(seed);
        for (int i = 0; i < 2000; ++i) {
          const std::size_t bytes = 4096 * (1 + random() % 3);
          std::byte* const data = arena_.allocate(bytes);
          data[0] = std::byte(seed);
          data[bytes - 1] = std::byte(seed);
          EXPECT_EQ(data[0], std::byte(seed));
          arena_.deallocate(data, bytes);
          ++num_served;
          if (random() % 50 == 0) {
            arena_.trim(0, 0);
          }
        }
      });
    }
  }
  EXPECT_EQ(num_served, 8000U);
  arena_.trim(0, 0);
  EXPECT_EQ(arena_.free_bytes(), 0U);
  EXPECT_EQ(traffic_->num_allocations, traffic_->num_deallocations);
}

TEST_F(SlotArenaTest, DescriptionNamesFreeSlotsAndUpstream) {
  EXPECT_EQ(arena_.description(), "slot arena (0 bytes in free slots) over recording");
}

}  // namespace
}  // namespace castor
