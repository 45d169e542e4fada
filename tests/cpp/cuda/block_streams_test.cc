#include "cuda/block_streams.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "core/memory_tier.h"
#include "cuda/cuda_error.h"
#include "cuda/fake_cuda_runtime.h"
#include "cuda/stream_order.h"

namespace castor::cuda {
namespace {

using testing::FakeCuda;

constexpr std::size_t kBytes = 64;

/// Torch's caching allocator for one size: one block, which every taker of its pool's stream gets
/// at once. Ordering its reuse is the user's.
class OneBlockArena final : public Arena {
 public:
  explicit OneBlockArena(std::array<std::byte, kBytes>& block) : block_(block) {}

  std::byte* allocate(std::size_t) override { throw Error("no stream was named"); }
  void deallocate(std::byte*, std::size_t) noexcept override {}
  std::byte* allocate_on(std::size_t bytes, StreamId stream) override {
    streams_.add(block_.data(), bytes, stream);
    return block_.data();
  }
  void deallocate_behind(std::byte* data, std::size_t, StreamId stream) noexcept override {
    streams_.remove(data, stream);
  }
  void await_users(const std::byte* data, StreamId stream) override {
    streams_.await_users(data, stream);
  }
  std::string description() const override { return "one block"; }
  BlockStreams& streams() { return streams_; }

 private:
  std::array<std::byte, kBytes>& block_;
  BlockStreams streams_{0};
};

class BlockStreamsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto arena = std::make_unique<OneBlockArena>(bytes_);
    arena_ = arena.get();
    tier_ = std::make_unique<MemoryTier>(TierKind::kDevice, kBytes, std::move(arena), compute_);
  }
  Block block() { return tier_->allocate(kBytes, "the test"); }
  /// A kernel that uses the block, and one of its next user.
  void use(cudaStream_t stream) { enqueue(stream, "used"); }
  void reuse(cudaStream_t stream) { enqueue(stream, "reused"); }
  void enqueue(cudaStream_t stream, const std::string& what) {
    fake_.enqueue(stream, [this, what] { done_.push_back(what); });
  }
  /// As far as it can, while the others stand still.
  void run(cudaStream_t stream) {
    while (fake_.step(stream)) {
    }
  }

  FakeCuda fake_;
  cudaStream_t a_ = fake_.new_stream();
  cudaStream_t b_ = fake_.new_stream();
  std::shared_ptr<ComputeStream> compute_ = std::make_shared<ComputeStream>(
      stream_id(a_), [](StreamId first, StreamId then) { order_streams(0, first, then); });
  std::array<std::byte, kBytes> bytes_{};
  OneBlockArena* arena_ = nullptr;  // the tier's
  std::unique_ptr<MemoryTier> tier_;
  std::vector<std::string> done_;
};

using Order = std::vector<std::string>;

TEST_F(BlockStreamsTest, ABlockOfTheStreamItIsUsedOnNeedsNoEvent) {
  Block slot = block();
  use(a_);
  slot.reset();
  EXPECT_EQ(fake_.num_queued(a_), 1u);
  EXPECT_EQ(fake_.num_calls("cudaEventRecord"), 0u);
}

TEST_F(BlockStreamsTest, WhenTheModelMovesToAnotherStreamItsPoolWaitsForThat) {
  Block slot = block();  // of a's pool
  compute_->move_to(stream_id(b_));
  use(b_);
  slot.reset();
  reuse(a_);
  run(a_);
  EXPECT_EQ(done_, Order{}) << "a's pool gave the block to somebody while b still used it";
  fake_.run_all();
  EXPECT_EQ(done_, (Order{"used", "reused"}));
}

TEST_F(BlockStreamsTest, TheNextStreamIsBehindAllThatTheOneBeforeWasGiven) {
  enqueue(a_, "first");
  compute_->move_to(stream_id(b_));
  enqueue(b_, "then");
  run(b_);
  EXPECT_EQ(done_, Order{});
  fake_.run_all();
  EXPECT_EQ(done_, (Order{"first", "then"}));
}

TEST_F(BlockStreamsTest, AStreamThatWasRecordedHoldsTheBlockBack) {
  Block slot = block();
  EXPECT_TRUE(arena_->streams().record(bytes_.data() + 8, stream_id(b_)));
  use(b_);  // given after the record, before the block goes: as torch counts it
  slot.reset();
  reuse(a_);
  run(a_);
  EXPECT_EQ(done_, Order{});
  fake_.run_all();
  EXPECT_EQ(done_, (Order{"used", "reused"}));
}

TEST_F(BlockStreamsTest, TheComputeStreamWaitsForUsersOnce) {
  Block slot = block();
  ASSERT_TRUE(arena_->streams().record(bytes_.data(), stream_id(b_)));
  ASSERT_TRUE(arena_->streams().record(bytes_.data(), stream_id(b_)));
  use(b_);
  slot.await_users();
  enqueue(a_, "written back");
  run(a_);
  EXPECT_EQ(done_, Order{});
  slot.await_users();
  slot.reset();
  EXPECT_EQ(fake_.num_calls("cudaEventRecord"), 1u);
  fake_.run_all();
  EXPECT_EQ(done_, (Order{"used", "written back"}));
}

TEST_F(BlockStreamsTest, OtherMemoryIsNotItsOwn) {
  Block slot = block();
  EXPECT_FALSE(arena_->streams().record(bytes_.data() + kBytes, stream_id(b_)));
  slot.reset();
  EXPECT_FALSE(arena_->streams().record(bytes_.data(), stream_id(b_)));
}

TEST_F(BlockStreamsTest, WhatCannotBeOrderedIsWaitedFor) {
  Block slot = block();
  ASSERT_TRUE(arena_->streams().record(bytes_.data(), stream_id(b_)));
  use(b_);
  fake_.fail_call("cudaEventRecord", 1, cudaErrorMemoryAllocation);
  slot.reset();
  EXPECT_EQ(done_, Order{"used"});
}

TEST_F(BlockStreamsTest, AFailedMoveChangesNothing) {
  fake_.fail_call("cudaStreamWaitEvent", 1, cudaErrorMemoryAllocation);
  EXPECT_THROW(compute_->move_to(stream_id(b_)), CudaError);
  EXPECT_EQ(compute_->id(), stream_id(a_));
  EXPECT_EQ(fake_.num_live_events(), 0u);
}

}  // namespace
}  // namespace castor::cuda
