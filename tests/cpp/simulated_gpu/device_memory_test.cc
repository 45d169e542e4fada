#include "device_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <latch>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace castor::simulated {
namespace {

constexpr std::size_t kBlock = DeviceMemory::kBlock;
constexpr std::byte kPoison{0xff};

class DeviceMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    main_ = Gpu::instance().new_stream();
    side_ = Gpu::instance().new_stream();
  }
  void TearDown() override { Gpu::instance().synchronize(); }
  static bool poisoned(const std::byte* data, std::size_t bytes) {
    return std::all_of(data, data + bytes, [](std::byte b) { return b == kPoison; });
  }

  DeviceMemory memory_{8 * kBlock};
  std::shared_ptr<Stream> main_;
  std::shared_ptr<Stream> side_;
};

TEST_F(DeviceMemoryTest, AFreedBlockIsItsStreamsAgainAtOnce) {
  std::byte* const block = memory_.allocate(100, main_);
  main_->enqueue([block] { *block = std::byte{1}; });
  memory_.free(block);
  EXPECT_EQ(memory_.allocate(kBlock, main_), block) << "of the same rounded size";
  memory_.free(block);
}

TEST_F(DeviceMemoryTest, AFreedBlockIsNoOtherStreams) {
  std::byte* const block = memory_.allocate(kBlock, main_);
  memory_.free(block);
  std::byte* const other = memory_.allocate(kBlock, side_);
  EXPECT_NE(other, block);
  memory_.free(other);
}

TEST_F(DeviceMemoryTest, NewMemoryIsPoison) {
  std::byte* const block = memory_.allocate(2 * kBlock, main_);
  EXPECT_TRUE(poisoned(block, 2 * kBlock));
  memory_.free(block);
}

TEST_F(DeviceMemoryTest, FreedMemoryBecomesPoisonInTheOrderOfItsStream) {
  std::byte* const block = memory_.allocate(kBlock, main_);
  std::vector<std::byte> seen;
  const auto read = [&] { seen.push_back(*block); };
  main_->enqueue([block] { *block = std::byte{7}; });
  main_->enqueue(read);
  memory_.free(block);
  main_->enqueue(read);
  main_->synchronize();
  EXPECT_EQ(seen, (std::vector{std::byte{7}, kPoison}));
}

TEST_F(DeviceMemoryTest, FreedMemoryIsOverwrittenWhenItIsReusedIfThatIsAskedFor) {
  memory_.overwrite_at(DeviceMemory::Overwrite::kReuse);
  std::byte* const block = memory_.allocate(kBlock, main_);
  main_->enqueue([block] { *block = std::byte{1}; });
  memory_.free(block);
  main_->synchronize();
  EXPECT_EQ(*block, std::byte{1}) << "a reader that later work of the stream waits for may go on";
  EXPECT_EQ(memory_.allocate(kBlock, main_), block);
  main_->synchronize();
  EXPECT_TRUE(poisoned(block, kBlock));
  memory_.free(block);
}

TEST_F(DeviceMemoryTest, ASideStreamThatIsNotRecordedReadsPoison) {
  std::byte* const block = memory_.allocate(kBlock, main_);
  main_->enqueue([block] { *block = std::byte{7}; });
  Moment(main_).block(*side_);
  std::latch freed(1);
  std::byte seen{};
  side_->enqueue([&] {
    freed.wait();
    seen = *block;
  });
  memory_.free(block);
  main_->synchronize();
  freed.count_down();
  side_->synchronize();
  EXPECT_EQ(seen, kPoison);
}

TEST_F(DeviceMemoryTest, ARecordedStreamIsWaitedFor) {
  std::byte* const block = memory_.allocate(kBlock, main_);
  main_->enqueue([block] { *block = std::byte{7}; });
  Moment(main_).block(*side_);
  std::latch freed(1);
  std::byte seen{};
  side_->enqueue([&] {
    freed.wait();
    seen = *block;
  });
  memory_.record(block, side_);
  memory_.free(block);
  std::byte* const other = memory_.allocate(kBlock, main_);
  EXPECT_NE(other, block) << "the side stream still uses it";
  freed.count_down();
  side_->synchronize();
  EXPECT_EQ(seen, std::byte{7});
  EXPECT_EQ(memory_.allocate(kBlock, main_), block);
  memory_.free(block);
  memory_.free(other);
}

TEST_F(DeviceMemoryTest, ItsOwnStreamNeedNotBeRecorded) {
  std::byte* const block = memory_.allocate(kBlock, main_);
  memory_.record(block, main_);
  memory_.free(block);
  EXPECT_EQ(memory_.allocate(kBlock, main_), block);
  memory_.free(block);
}

TEST_F(DeviceMemoryTest, WhatIsCachedMakesRoomForWhatIsAsked) {
  std::byte* const kept = memory_.allocate(2 * kBlock, main_);
  std::byte* const cached = memory_.allocate(6 * kBlock, side_);
  EXPECT_EQ(memory_.allocate(kBlock, main_), nullptr) << "exactly full";
  memory_.free(cached);
  EXPECT_EQ(memory_.figures().reserved, 8 * kBlock);
  std::byte* const block = memory_.allocate(5 * kBlock, main_);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(memory_.figures().reserved, 7 * kBlock);
  memory_.free(block);
  memory_.free(kept);
}

TEST_F(DeviceMemoryTest, WhatIsHeldBackMakesRoomWhenItsUsersAreDone) {
  std::byte* const block = memory_.allocate(8 * kBlock, main_);
  memory_.record(block, side_);
  side_->enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  memory_.free(block);
  std::byte* const next = memory_.allocate(8 * kBlock, side_);
  EXPECT_NE(next, nullptr);
  EXPECT_TRUE(Moment(side_).past());
  memory_.free(next);
}

TEST_F(DeviceMemoryTest, ALimitIsAShareOfTheCapacity) {
  memory_.limit(0.5);
  EXPECT_EQ(memory_.allocate(5 * kBlock, main_), nullptr);
  std::byte* const block = memory_.allocate(4 * kBlock, main_);
  EXPECT_NE(block, nullptr);
  memory_.free(block);
}

TEST_F(DeviceMemoryTest, FiguresAndTrackerCountBytes) {
  std::vector<std::pair<DeviceMemory::Action, std::size_t>> told;
  memory_.track([&](DeviceMemory::Action action, std::byte*, std::size_t bytes) {
    told.emplace_back(action, bytes);
  });
  std::byte* const block = memory_.allocate(600, main_);
  EXPECT_EQ(memory_.figures().allocated, 2 * kBlock);
  memory_.free(block);
  EXPECT_EQ(memory_.figures().allocated, 0);
  EXPECT_EQ(memory_.figures().peak_allocated, 2 * kBlock);
  EXPECT_EQ(told, (std::vector{std::pair{DeviceMemory::Action::kAllocated, std::size_t{600}},
                               std::pair{DeviceMemory::Action::kFreed, std::size_t{600}}}));
  memory_.reset_peaks();
  EXPECT_EQ(memory_.figures().peak_allocated, 0);
}

TEST_F(DeviceMemoryTest, ItKnowsItsAddresses) {
  std::byte* const block = memory_.allocate(kBlock, main_);
  EXPECT_TRUE(memory_.contains(block + kBlock - 1));
  EXPECT_FALSE(memory_.contains(block + kBlock));
  EXPECT_FALSE(memory_.contains(&memory_));
  memory_.free(block);
}

TEST_F(DeviceMemoryTest, GivingBackTwiceIsAnError) {
  std::byte* const block = memory_.allocate(kBlock, main_);
  memory_.free(block);
  EXPECT_THROW(memory_.free(block), std::logic_error);
}

TEST_F(DeviceMemoryTest, ManyThreadsNeverShareABlock) {
  DeviceMemory memory(1 << 20);
  std::mutex mutex;
  std::set<std::byte*> live;
  std::vector<std::jthread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 300; ++i) {
        const auto& stream = random() % 2 == 0 ? main_ : side_;
        std::byte* const data = memory.allocate((random() % 4 + 1) * kBlock, stream);
        ASSERT_NE(data, nullptr);
        {
          const std::lock_guard lock(mutex);
          ASSERT_TRUE(live.insert(data).second);
        }
        if (random() % 4 == 0)
          memory.record(data, side_);
        {
          const std::lock_guard lock(mutex);
          live.erase(data);
        }
        memory.free(data);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(memory.figures().allocated, 0);
}

}  // namespace
}  // namespace castor::simulated
