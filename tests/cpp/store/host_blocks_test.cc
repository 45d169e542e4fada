#include "core/host_blocks.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/fakes.h"
#include "store/errors.h"

namespace castor::testing {
namespace {

using Account = HostBlocks::Account;

/// Counts what it hands out, and refuses to hand out more than `limit` at once.
class CountingArena final : public HeapArena {
 public:
  CountingArena(std::shared_ptr<LiveBlocks> live, int* calls, const std::size_t* limit)
      : HeapArena(live), live_(std::move(live)), calls_(calls), limit_(limit) {}
  std::byte* allocate(std::size_t bytes) override {
    if (live_->bytes() + bytes > *limit_) {
      throw OutOfMemory(TierKind::kHost, bytes, *limit_ - live_->bytes(), *limit_, "locked");
    }
    ++*calls_;
    return HeapArena::allocate(bytes);
  }

 private:
  const std::shared_ptr<LiveBlocks> live_;
  int* const calls_;
  const std::size_t* const limit_;
};

class HostBlocksTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::size_t used() const { return host_->ledger().used(); }
  /// Takes `count` blocks of 100 bytes at once, and gives them back.
  static void take_and_give_back(HostBlocks& blocks, int count) {
    std::vector<Block> taken;
    for (int i = 0; i < count; ++i) {
      taken.push_back(blocks.take(100));
    }
    for (Block& block : taken) {
      blocks.give_back(std::move(block));
    }
  }

  int calls_ = 0;
  std::size_t limit_ = 1 << 20;
  const std::shared_ptr<LiveBlocks> live_ = std::make_shared<LiveBlocks>();
  const std::shared_ptr<MemoryTier> host_ = std::make_shared<MemoryTier>(
      TierKind::kHost, 1000, std::make_unique<CountingArena>(live_, &calls_, &limit_));
  HostBlocks paid_{host_, "raise host_memory", Account::kHost};
  HostBlocks unpaid_{host_, "raise host_memory", Account::kNobody, 200};
};

TEST_F(HostBlocksTest, ABufferThatCameBackServesTheNextOfItsSize) {
  for (HostBlocks* const blocks : {&paid_, &unpaid_}) {
    Block block = blocks->take(100);
    const std::byte* const data = block.data();
    blocks->give_back(std::move(block));
    EXPECT_EQ(blocks->kept_bytes(), 100U);
    EXPECT_EQ(blocks->take(100).data(), data);
  }
}

TEST_F(HostBlocksTest, ABufferOfAnotherSizeIsAllocated) {
  paid_.give_back(paid_.take(100));
  const Block other = paid_.take(60);
  EXPECT_EQ(used(), 160U);
  EXPECT_EQ(paid_.kept_bytes(), 100U);
}

TEST_F(HostBlocksTest, NoMoreBytesAreKeptThanWereInUseAtOnce) {
  paid_.give_back(paid_.take(100));
  paid_.give_back(paid_.take(60));
  EXPECT_EQ(paid_.kept_bytes(), 60U) << "the one that is kept longest goes";
  EXPECT_EQ(used(), 60U);
}

TEST_F(HostBlocksTest, KeptBuffersGiveWayBeforeTheHostCountsAsFull) {
  paid_.give_back(paid_.take(600));
  const Block large = paid_.take(900);
  EXPECT_EQ(used(), 900U);
  EXPECT_EQ(paid_.kept_bytes(), 0U);
  expect_out_of_memory([&] { (void)paid_.take(200); }, TierKind::kHost, 200, 100, 1000);
}

TEST_F(HostBlocksTest, TheHostPaysForWhatIsInUseAlone) {
  for (int pass = 0; pass < 5; ++pass) {
    Block first = unpaid_.take(100);
    Block second = unpaid_.take(100);
    EXPECT_EQ(used(), 200U);
    unpaid_.give_back(std::move(first));
    unpaid_.give_back(std::move(second));
    EXPECT_EQ(used(), 0U);
  }
  EXPECT_EQ(calls_, 2);
}

TEST_F(HostBlocksTest, NoMoreIsKeptThanWasSaid) {
  take_and_give_back(unpaid_, 5);
  EXPECT_EQ(live_->bytes(), 200U);
  unpaid_.end();
  EXPECT_EQ(live_->bytes(), 0U);
  take_and_give_back(unpaid_, 1);
  EXPECT_EQ(live_->bytes(), 0U);
}

TEST_F(HostBlocksTest, ABufferThatIsKeptNeedsRoomOnTheHostToBeTaken) {
  unpaid_.give_back(unpaid_.take(200));
  const Block other = host_->allocate(900, "");
  expect_out_of_memory([&] { (void)unpaid_.take(200); }, TierKind::kHost, 200, 100, 1000);
  EXPECT_EQ(used(), 900U);
}

TEST_F(HostBlocksTest, NoMoreIsKeptBesideABufferThanTheHostHasLeft) {
  take_and_give_back(unpaid_, 2);
  const Block other = host_->allocate(750, "");
  const Block taken = unpaid_.take(100);
  EXPECT_EQ(calls_, 3);
  EXPECT_EQ(unpaid_.kept_bytes(), 100U);
  const Block third = unpaid_.take(60);
  EXPECT_EQ(unpaid_.kept_bytes(), 0U);
  EXPECT_EQ(live_->bytes(), 910U);
}

TEST_F(HostBlocksTest, KeptBuffersGiveWayBeforeTheSystemRefuses) {
  for (HostBlocks* const blocks : {&paid_, &unpaid_}) {
    take_and_give_back(*blocks, 2);
    limit_ = 250;
    const Block other = blocks->take(120);
    EXPECT_EQ(blocks->kept_bytes(), 0U);
    EXPECT_EQ(live_->bytes(), 120U);
    limit_ = 1 << 20;
  }
}

}  // namespace
}  // namespace castor::testing
