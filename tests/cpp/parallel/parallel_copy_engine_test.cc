#include "parallel/parallel_copy_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/error.h"
#include "parallel/thread_executor.h"

namespace castor {
namespace {

/// Adversary: runs bodies in turn and fails at the n-th.
class FailingExecutor final : public Executor {
 public:
  explicit FailingExecutor(std::size_t failing_call) : failing_call_(failing_call) {}
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) override {
    for (std::size_t i = 0; i < count; ++i) {
      if (++num_calls_ == failing_call_) {
        throw std::runtime_error("executor failed");
      }
      body(i);
    }
  }
  std::size_t num_threads() const noexcept override { return 2; }

 private:
  const std::size_t failing_call_;
  std::size_t num_calls_ = 0;
};

std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  std::generate(bytes.begin(), bytes.end(), [&] { return std::byte(random()); });
  return bytes;
}

class ParallelCopyEngineTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kBlock = 4096;
  ThreadExecutor executor_{3};
  ParallelCopyEngine engine_{executor_, kBlock};
};

TEST_F(ParallelCopyEngineTest, CopiesExactlyTheBytesAskedFor) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kBlock - 1, kBlock, kBlock + 1,
                                  2 * kBlock, 7 * kBlock + 13, 100 * kBlock}) {
    const auto source = random_bytes(bytes, 1);
    std::vector<std::byte> target(bytes + 2, std::byte{0xee});  // a guard on either side
    const CopyTicket ticket =
        engine_.submit({.source = source, .target = std::span(target).subspan(1, bytes)});
    EXPECT_TRUE(engine_.done(ticket));
    EXPECT_NO_THROW(engine_.wait(ticket));
    EXPECT_TRUE(std::equal(source.begin(), source.end(), target.begin() + 1)) << bytes;
    EXPECT_EQ(target.front(), std::byte{0xee});
    EXPECT_EQ(target.back(), std::byte{0xee});
  }
}

TEST_F(ParallelCopyEngineTest, UnequalSizesAreRefusedAndNothingIsWritten) {
  const std::vector<std::byte> source(10, std::byte{1});
  std::vector<std::byte> target(11, std::byte{2});
  EXPECT_THROW((void)engine_.submit({.source = source, .target = target}), InvalidArgument);
  EXPECT_EQ(target, std::vector<std::byte>(11, std::byte{2}));
  EXPECT_THROW((void)engine_.submit({.source = source, .target = {}}), InvalidArgument);
}

TEST_F(ParallelCopyEngineTest, OverlappingBuffersAreRefused) {
  std::vector<std::byte> bytes(100);
  const std::span all(bytes);
  EXPECT_THROW((void)engine_.submit({.source = all.first(60), .target = all.last(60)}),
               InvalidArgument);
  EXPECT_THROW((void)engine_.submit({.source = all, .target = all}), InvalidArgument);
  EXPECT_NO_THROW((void)engine_.submit({.source = all.first(50), .target = all.last(50)}));
}

TEST_F(ParallelCopyEngineTest, TicketsGrowAndUnknownOnesAreRefused) {
  const std::vector<std::byte> source(8);
  std::vector<std::byte> target(8);
  EXPECT_TRUE(engine_.done(CopyTicket::kNone));
  const auto submit = [&](CopyDirection direction) {
    return engine_.submit({.source = source, .target = target, .direction = direction});
  };
  const CopyTicket first = submit(CopyDirection::kHostToDevice);
  const CopyTicket second = submit(CopyDirection::kDeviceToHost);
  const CopyTicket third = submit(CopyDirection::kHostToDevice);
  EXPECT_LT(CopyTicket::kNone, first);
  EXPECT_LT(first, second);
  EXPECT_LT(second, third);
  EXPECT_THROW(engine_.wait(CopyTicket{4}), InvalidArgument);
  EXPECT_THROW((void)engine_.done(CopyTicket{4}), InvalidArgument);
}

TEST_F(ParallelCopyEngineTest, ZeroBlockBytesAreRefused) {
  EXPECT_THROW(ParallelCopyEngine(executor_, 0), InvalidArgument);
}

TEST(ParallelCopyEngineAdversaryTest, AFailureAtAnyBlockReachesTheSubmitter) {
  const auto source = random_bytes(5 * 64, 2);
  for (std::size_t failing = 1; failing <= 5; ++failing) {
    FailingExecutor executor(failing);
    ParallelCopyEngine engine(executor, 64);
    std::vector<std::byte> target(source.size());
    EXPECT_THROW((void)engine.submit({.source = source, .target = target}), std::runtime_error);
    EXPECT_THROW((void)engine.done(CopyTicket{1}), InvalidArgument) << "no ticket was given out";
    const CopyTicket ticket = engine.submit({.source = source, .target = target});
    EXPECT_EQ(ticket, CopyTicket{1});
    EXPECT_EQ(target, source);
  }
}

TEST_F(ParallelCopyEngineTest, ConcurrentHammerGivesEveryCopyItsOwnTicket) {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kCopies = 100;
  std::vector<std::vector<CopyTicket>> tickets(kThreads);
  std::atomic<std::size_t> num_wrong{0};
  {
    std::vector<std::jthread> threads;
    for (std::size_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const auto source = random_bytes(5 * kBlock + thread, static_cast<unsigned>(thread));
        for (std::size_t i = 0; i < kCopies; ++i) {
          std::vector<std::byte> target(source.size());
          tickets[thread].push_back(engine_.submit({.source = source, .target = target}));
          num_wrong += target == source ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(num_wrong, 0U);
  std::vector<CopyTicket> all;
  for (const auto& each : tickets) {
    EXPECT_TRUE(std::is_sorted(each.begin(), each.end()));
    all.insert(all.end(), each.begin(), each.end());
  }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
  EXPECT_EQ(all.back(), CopyTicket{kThreads * kCopies});
}

}  // namespace
}  // namespace castor
