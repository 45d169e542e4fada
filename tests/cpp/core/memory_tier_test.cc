#include "core/memory_tier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/payload.h"
#include "core/units.h"

namespace castor {
namespace {

using testing::FailingArena;
using testing::HeapArena;
using testing::LiveBlocks;

static_assert(!std::is_copy_constructible_v<Block> && !std::is_copy_assignable_v<Block>);
static_assert(std::is_nothrow_move_constructible_v<Block>);
static_assert(std::is_nothrow_move_assignable_v<Block>);

class MemoryTierTest : public ::testing::Test {
 protected:
  std::shared_ptr<LiveBlocks> live_ = std::make_shared<LiveBlocks>();
  MemoryTier tier_{TierKind::kHost, 1024, std::make_unique<HeapArena>(live_)};
};

TEST_F(MemoryTierTest, BlockIsAlignedChargedAndReturned) {
  {
    const Block block = tier_.allocate(100, "");
    EXPECT_TRUE(block);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % kParamAlignment, 0u);
    EXPECT_EQ(block.bytes(), 100u);
    EXPECT_EQ(tier_.ledger().used(), 100u);
    EXPECT_EQ(live_->bytes(), 100u);
  }
  EXPECT_EQ(tier_.ledger().used(), 0u);
  EXPECT_EQ(live_->count(), 0u);
}

TEST_F(MemoryTierTest, ExactFitThenExhaustion) {
  const Block all = tier_.allocate(1024, "");
  try {
    (void)tier_.allocate(1, "Make the model smaller.");
    FAIL() << "no throw";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.requested(), 1u);
    EXPECT_EQ(error.available(), 0u);
    EXPECT_EQ(error.budget(), 1024u);
  }
  EXPECT_EQ(live_->count(), 1u) << "the arena was not asked";
}

TEST_F(MemoryTierTest, ZeroBytesTakeNoMemory) {
  const Block nothing = tier_.allocate(0, "");
  EXPECT_FALSE(nothing);
  EXPECT_EQ(nothing.data(), nullptr);
  EXPECT_EQ(live_->count(), 0u);
}

TEST_F(MemoryTierTest, ReservedBytesBecomeMemoryWithoutBeingChargedTwice) {
  Reservation reservation = tier_.ledger().reserve(512, "");
  const Block block = tier_.allocate(std::move(reservation));
  EXPECT_EQ(tier_.ledger().used(), 512u);
  EXPECT_EQ(live_->bytes(), 512u);
}

TEST_F(MemoryTierTest, MovedBlockIsFreedOnce) {
  Block first = tier_.allocate(128, "");
  const std::byte* data = first.data();
  Block second = std::move(first);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(first.bytes(), 0u);
  EXPECT_EQ(second.data(), data);
  Block third = tier_.allocate(256, "");
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(tier_.ledger().used(), 128u);
  EXPECT_EQ(live_->bytes(), 128u);
  Block& same = third;
  third = std::move(same);
  EXPECT_EQ(third.data(), data);
  third.reset();
  third.reset();
  EXPECT_EQ(tier_.ledger().used(), 0u);
  EXPECT_EQ(live_->count(), 0u);
}

TEST(MemoryTierFailureTest, RefusalOfTheArenaGivesTheBytesBack) {
  const auto live = std::make_shared<LiveBlocks>();
  MemoryTier tier(TierKind::kHost, 1024, std::make_unique<FailingArena>(live, 2));
  const Block first = tier.allocate(100, "");
  EXPECT_THROW((void)tier.allocate(100, ""), OutOfMemory);
  EXPECT_EQ(tier.ledger().used(), 100u);
  const Block third = tier.allocate(924, "");
  EXPECT_EQ(tier.ledger().available(), 0u);
}

TEST(PayloadTest, OutlivesWhoeverMadeTheTier) {
  const auto live = std::make_shared<LiveBlocks>();
  auto tier =
      std::make_shared<MemoryTier>(TierKind::kHost, 1024, std::make_unique<HeapArena>(live));
  auto payload = std::make_shared<Payload>(std::move(tier), 64, "");
  EXPECT_EQ(payload->tier(), TierKind::kHost);
  EXPECT_EQ(payload->bytes(), 64u);
  EXPECT_EQ(live->bytes(), 64u);
  payload.reset();
  EXPECT_EQ(live->count(), 0u);
}

TEST_F(MemoryTierTest, ThreadsTogetherNeverPassTheBudget) {
  std::atomic<int> violations{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<Block> mine;
      for (int i = 0; i < 3000; ++i) {
        try {
          mine.push_back(tier_.allocate(1 + random() % 400, ""));
        } catch (const OutOfMemory&) {
          mine.clear();
        }
        violations += live_->bytes() > 1024 || tier_.ledger().used() > 1024 ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(violations, 0);
  EXPECT_EQ(tier_.ledger().used(), 0u);
  EXPECT_EQ(live_->count(), 0u);
}

}  // namespace
}  // namespace castor
