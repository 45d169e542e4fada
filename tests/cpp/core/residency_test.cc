#include "core/residency.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"

namespace castor {
namespace {

using testing::chunk_id;
using testing::Net;

constexpr std::size_t kChunk = Net::kChunk;

/// Chunks of kChunk bytes each, all streamed unless said otherwise.
struct Account : Residency {
  explicit Account(std::size_t count, std::vector<Placement> placements = {})
      : Residency(Net::row(count).layout(), sized(std::move(placements), count)) {}

  static std::vector<Placement> sized(std::vector<Placement> placements, std::size_t count) {
    placements.resize(count, Placement::kStream);
    return placements;
  }
  void come(std::size_t chunk, std::uint64_t next_use) {
    set_next_use(chunk_id(chunk), next_use);
    take_slot(chunk_id(chunk));
  }
  /// What would leave first; nothing does.
  [[nodiscard]] std::optional<ChunkId> victim(std::uint64_t horizon = 0) {
    std::optional<ChunkId> found;
    evict_until([&] { return found.has_value(); }, horizon, [&](ChunkId chunk) { found = chunk; });
    return found;
  }
};

TEST(ResidencyTest, RejectsPlacementsForAnotherModel) {
  EXPECT_THROW(Residency(Net::row(2).layout(), std::vector<Placement>(3)), InvalidArgument);
}

TEST(ResidencyTest, EmptyAccountHasNoVictim) {
  Account account(3, {Placement::kStream, Placement::kDevice, Placement::kStream});
  EXPECT_EQ(account.victim(), std::nullopt);
  EXPECT_EQ(account.slot_bytes(), 0u);
  EXPECT_FALSE(account.resident(chunk_id(0)));
  EXPECT_TRUE(account.resident(chunk_id(1)));
}

TEST(ResidencyTest, FurthestNextUseGoesFirst) {
  Account account(4);
  account.come(0, 7);
  account.come(1, 9);
  account.come(2, 8);
  for (const std::size_t expected : {1, 2, 0}) {
    ASSERT_EQ(account.victim(), chunk_id(expected));
    account.give_up_slot(chunk_id(expected));
  }
  EXPECT_EQ(account.victim(), std::nullopt);
}

TEST(ResidencyTest, NeverUsedGoesBeforeAnyUse) {
  Account account(3);
  account.come(0, kNeverUsed - 1);
  account.come(1, kNeverUsed);
  EXPECT_EQ(account.victim(), chunk_id(1));
}

TEST(ResidencyTest, TiesGoByLowestId) {
  Account account(5);
  for (const std::size_t chunk : {4, 2, 3}) {
    account.come(chunk, kNeverUsed);
  }
  EXPECT_EQ(account.victim(), chunk_id(2));
}

TEST(ResidencyTest, ANewNextUseMovesTheChunk) {
  Account account(2);
  account.come(0, 5);
  account.come(1, 6);
  account.set_next_use(chunk_id(0), 7);
  EXPECT_EQ(account.victim(), chunk_id(0));
  account.set_next_use(chunk_id(0), 1);
  EXPECT_EQ(account.victim(), chunk_id(1));
}

TEST(ResidencyTest, HorizonSparesWhatIsNeededBefore) {
  Account account(2);
  account.come(0, 5);
  account.come(1, 9);
  EXPECT_EQ(account.victim(10), std::nullopt);
  EXPECT_EQ(account.victim(9), chunk_id(1));
  EXPECT_TRUE(account.could_fit(kChunk, 2 * kChunk, 9)) << "one leaves";
  EXPECT_FALSE(account.could_fit(kChunk, kChunk, 9)) << "the other one is needed before";
  EXPECT_TRUE(account.could_fit(kChunk, kChunk, 5));
  EXPECT_EQ(account.slot_bytes(), 2 * kChunk) << "nothing left";
}

TEST(ResidencyTest, PinnedChunksStay) {
  Account account(2);
  account.come(0, 9);
  account.come(1, 5);
  {
    const Pin first = account.pin(chunk_id(0));
    Pin second = account.pin(chunk_id(0));
    EXPECT_EQ(account.pinned_bytes(), kChunk) << "once";
    second.release();
    EXPECT_EQ(account.pins(chunk_id(0)), 1u);
    EXPECT_EQ(account.victim(), chunk_id(1));
    account.set_next_use(chunk_id(0), 4);
  }
  EXPECT_EQ(account.pinned_bytes(), 0u);
  EXPECT_EQ(account.victim(), chunk_id(1))
      << "the other one's next use changed while it was pinned";
}

TEST(ResidencyTest, KeptChunksNeverLeaveAndAreHeldFromTheirFirstPinOn) {
  Account account(1, {Placement::kKeep});
  account.come(0, 9);
  EXPECT_EQ(account.victim(), std::nullopt);
  EXPECT_EQ(account.held_bytes(), 0u) << "only prefetched";
  account.pin(chunk_id(0)).release();
  EXPECT_EQ(account.held_bytes(), kChunk);
  EXPECT_EQ(account.pinned_bytes(), 0u);
  account.give_up_slot(chunk_id(0));  // the step is over
  EXPECT_EQ(account.held_bytes(), 0u);
}

TEST(ResidencyTest, PromotedChunksTakeNoSlotAndComeBackWithTheirPins) {
  Account account(2);
  account.promote(chunk_id(0));
  EXPECT_TRUE(account.resident(chunk_id(0)));
  {
    const Pin pin = account.pin(chunk_id(0));
    EXPECT_EQ(account.slot_bytes() + account.pinned_bytes(), 0u);
    account.demote(chunk_id(0));
    EXPECT_EQ(account.slot_bytes(), kChunk);
    EXPECT_EQ(account.pinned_bytes(), kChunk);
    EXPECT_EQ(account.victim(), std::nullopt);
  }
  EXPECT_EQ(account.victim(), chunk_id(0));
  EXPECT_EQ(account.held_bytes(), 0u);
}

TEST(ResidencyTest, MovedPinIsGivenBackOnce) {
  Account account(2);
  account.come(0, 1);
  account.come(1, 1);
  Pin first = account.pin(chunk_id(0));
  Pin second = account.pin(chunk_id(1));
  second = std::move(first);
  EXPECT_EQ(account.pins(chunk_id(0)), 1u);
  EXPECT_EQ(account.pins(chunk_id(1)), 0u);
  const Pin third(std::move(second));
  EXPECT_EQ(account.pins(chunk_id(0)), 1u);
}

TEST(ResidencyTest, AgreesWithALinearScan) {
  constexpr std::size_t kChunks = 12;
  std::mt19937 random(7);
  Account account(kChunks, {Placement::kKeep});
  std::vector<std::pair<std::size_t, Pin>> pins;
  for (int i = 0; i < 50'000; ++i) {
    const std::size_t id = random() % kChunks;
    const ChunkId chunk = chunk_id(id);
    switch (random() % 5) {
      case 0:
        if (!account.resident(chunk)) {
          account.take_slot(chunk);
        }
        break;
      case 1:
        if (account.in_slot(chunk) && account.pins(chunk) == 0) {
          account.give_up_slot(chunk);
        }
        break;
      case 2:
        if (account.resident(chunk)) {
          pins.emplace_back(id, account.pin(chunk));
        }
        break;
      case 3:
        if (!pins.empty()) {
          std::swap(pins[random() % pins.size()], pins.back());
          pins.pop_back();
        }
        break;
      default: account.set_next_use(chunk, random() % 5 == 0 ? kNeverUsed : random() % 32);
    }
    const std::uint64_t horizon = random() % 32;
    std::optional<ChunkId> expected;
    std::size_t may_leave = 0;
    for (std::size_t other = 0; other < kChunks; ++other) {
      const ChunkId candidate = chunk_id(other);
      if (other > 0 && account.in_slot(candidate) && account.pins(candidate) == 0 &&
          account.next_use(candidate) >= horizon) {
        may_leave += kChunk;
        if (!expected || account.next_use(candidate) > account.next_use(*expected)) {
          expected = candidate;
        }
      }
    }
    ASSERT_EQ(account.victim(horizon), expected) << "operation " << i;
    const std::size_t cap = kChunk * (random() % kChunks);
    ASSERT_EQ(account.could_fit(kChunk, cap, horizon),
              account.slot_bytes() - may_leave + kChunk <= cap);
  }
}

}  // namespace
}  // namespace castor
