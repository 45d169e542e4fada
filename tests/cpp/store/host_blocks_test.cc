#include "store/host_blocks.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "core/fakes.h"
#include "store/errors.h"

namespace castor::testing {
namespace {

class HostBlocksTest : public ::testing::Test {
 protected:
  HostBlocksTest()
      : host_(TierKind::kHost, 1000, std::make_unique<HeapArena>(std::make_shared<LiveBlocks>())) {}
  [[nodiscard]] std::size_t used() const { return host_.ledger().used(); }

  MemoryTier host_;
  HostBlocks blocks_{host_, "raise host_memory"};
};

TEST_F(HostBlocksTest, ABufferThatCameBackServesTheNextOfItsSize) {
  Block block = blocks_.take(100);
  const std::byte* const data = block.data();
  blocks_.give_back(std::move(block));
  EXPECT_EQ(blocks_.kept_bytes(), 100U);
  EXPECT_EQ(blocks_.take(100).data(), data);
}

TEST_F(HostBlocksTest, ABufferOfAnotherSizeIsAllocated) {
  blocks_.give_back(blocks_.take(100));
  const Block other = blocks_.take(60);
  EXPECT_EQ(used(), 160U);
  EXPECT_EQ(blocks_.kept_bytes(), 100U);
}

TEST_F(HostBlocksTest, NoMoreBytesAreKeptThanWereInUseAtOnce) {
  blocks_.give_back(blocks_.take(100));
  blocks_.give_back(blocks_.take(60));
  EXPECT_EQ(blocks_.kept_bytes(), 60U) << "the one that is kept longest goes";
  EXPECT_EQ(used(), 60U);
}

TEST_F(HostBlocksTest, KeptBuffersGiveWayBeforeTheHostCountsAsFull) {
  blocks_.give_back(blocks_.take(600));
  const Block large = blocks_.take(900);
  EXPECT_EQ(used(), 900U);
  EXPECT_EQ(blocks_.kept_bytes(), 0U);
  expect_out_of_memory([&] { (void)blocks_.take(200); }, TierKind::kHost, 200, 100, 1000);
}

}  // namespace
}  // namespace castor::testing
