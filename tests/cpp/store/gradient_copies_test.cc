#include "store/gradient_copies.h"

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/fakes.h"
#include "store/errors.h"
#include "store/fake_device.h"
#include "store/small_model.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kNumel = 1024;
constexpr std::size_t kBytes = 4 * kNumel;

/// Gradients of three chunks on their way, with a window for `window` of them.
class GradientCopiesTest : public ::testing::Test {
 protected:
  GradientCopiesTest()
      : layout_(SmallModel::row(3, kNumel).layout(kBytes)),
        tier_(TierKind::kDevice, 16 * kBytes, device_.make_device_arena()),
        account_(std::make_shared<NonModelMemory>(
            std::make_shared<Ledger>(TierKind::kDevice, 16 * kBytes))),
        targets_(3, Bytes(kBytes)) {
    copies_ = std::make_unique<GradientCopies>(layout_, engine_, tier_, device_, *account_);
  }
  /// Sends a gradient of bytes `value`; returns what tells whether its memory is still there.
  std::weak_ptr<void> send(std::size_t chunk, int value, std::size_t bytes = kBytes) {
    auto memory = std::make_shared<Bytes>(bytes, static_cast<std::byte>(value));
    account_->note_allocated(bytes);  // FakeDevice hears of the allocation's end
    EXPECT_TRUE(
        copies_->submit(chunk_id(chunk), *memory, memory, std::span(targets_[chunk]).first(bytes)));
    return memory;
  }
  [[nodiscard]] bool arrived(std::size_t chunk, int value) const {
    return targets_[chunk] == Bytes(kBytes, static_cast<std::byte>(value));
  }

  FakeDevice device_;
  ChunkLayout layout_;
  MemoryTier tier_;
  FailingCopyEngine engine_;
  std::shared_ptr<NonModelMemory> account_;
  std::vector<Bytes> targets_;
  std::unique_ptr<GradientCopies> copies_;
};

TEST_F(GradientCopiesTest, TheWindowTakesTheLargestGradientFromTheDevice) {
  EXPECT_EQ(tier_.ledger().used(), kBytes);
  copies_.reset();
  EXPECT_EQ(tier_.ledger().used(), 0U);
  MemoryTier small(TierKind::kDevice, kBytes - 1, device_.make_device_arena());
  expect_out_of_memory(
      [&] { const GradientCopies copies(layout_, engine_, small, device_, *account_); },
      TierKind::kDevice, kBytes, kBytes - 1, kBytes - 1);
}

TEST_F(GradientCopiesTest, AGradientArrivesWhenItsChunkIsWaitedForAndItsMemoryIsDropped) {
  const std::weak_ptr<void> memory = send(1, 7);
  EXPECT_FALSE(arrived(1, 7));
  EXPECT_FALSE(memory.expired());
  EXPECT_NE(copies_->last_of(chunk_id(1)), CopyTicket::kNone);
  EXPECT_EQ(copies_->last_of(chunk_id(0)), CopyTicket::kNone);
  copies_->wait(chunk_id(0));
  EXPECT_FALSE(arrived(1, 7)) << "nobody waits for another chunk's gradient";
  copies_->wait(chunk_id(1));
  EXPECT_TRUE(arrived(1, 7));
  EXPECT_TRUE(memory.expired());
  EXPECT_EQ(copies_->last_of(chunk_id(1)), CopyTicket::kNone);
}

TEST_F(GradientCopiesTest, AFullWindowWaitsForTheOldestGradients) {
  const std::weak_ptr<void> first = send(0, 1, kBytes / 2);
  const std::weak_ptr<void> second = send(1, 2, kBytes / 2);
  EXPECT_EQ(engine_.num_pending(), 2U);
  send(2, 3, kBytes / 4);
  EXPECT_TRUE(first.expired());
  EXPECT_FALSE(second.expired());
}

TEST_F(GradientCopiesTest, WhatIsEmptyOrLargerThanTheWindowIsNotSent) {
  Bytes large(kBytes + 1);
  EXPECT_FALSE(copies_->submit(chunk_id(0), large, nullptr, large));
  EXPECT_FALSE(copies_->submit(chunk_id(0), {}, nullptr, {}));
  EXPECT_EQ(engine_.num_pending(), 0U);
}

TEST_F(GradientCopiesTest, AnAllocatorThatGoesOnCountingIsToldWhenTheGradientHasArrived) {
  send(0, 1);
  EXPECT_EQ(account_->bytes(), 0U) << "the window pays";
  copies_->wait(chunk_id(0));
  EXPECT_EQ(account_->bytes(), kBytes);
}

TEST_F(GradientCopiesTest, AFailedCopyIsRethrownFromThenOn) {
  send(0, 1);
  engine_.fail_wait(1);
  EXPECT_THROW(copies_->wait(chunk_id(0)), InjectedFailure);
  EXPECT_THROW(copies_->wait(chunk_id(2)), InjectedFailure);
  Bytes gradient(kBytes);
  EXPECT_THROW((void)copies_->submit(chunk_id(1), gradient, nullptr, targets_[1]), InjectedFailure);
}

TEST_F(GradientCopiesTest, TheEndWaitsForAllCopies) {
  const std::weak_ptr<void> memory = send(0, 9);
  copies_.reset();
  EXPECT_TRUE(arrived(0, 9));
  EXPECT_TRUE(memory.expired());
}

}  // namespace
}  // namespace castor::testing
