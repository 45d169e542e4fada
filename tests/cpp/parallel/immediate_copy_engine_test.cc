#include "parallel/immediate_copy_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/random_bytes.h"

namespace castor {
namespace {

using testing::random_bytes;

using Bytes = std::vector<std::byte>;

TEST(ImmediateCopyEngineTest, CopiesExactlyTheBytesAskedForFromAndToAnyAddress) {
  ImmediateCopyEngine engine;
  for (const std::size_t bytes : {0U, 1U, 63U, 4096U, 32'767U, 32'769U, 1'000'003U}) {
    for (const std::size_t skew : {0U, 1U, 7U}) {
      const Bytes source = random_bytes(bytes + skew, 1);
      Bytes target(bytes + 2 + skew, std::byte{0xee});  // a guard on either side
      const CopyTicket ticket =
          engine.submit({.source = std::span(source).subspan(skew),
                         .target = std::span(target).subspan(1 + skew, bytes)});
      EXPECT_TRUE(engine.done(ticket));
      EXPECT_NO_THROW(engine.wait(ticket));
      EXPECT_TRUE(std::equal(source.begin() + skew, source.end(), target.begin() + 1 + skew))
          << bytes << " bytes, " << skew << " further";
      EXPECT_EQ(target[skew], std::byte{0xee});
      EXPECT_EQ(target.back(), std::byte{0xee});
    }
  }
}

TEST(ImmediateCopyEngineTest, UnequalSizesAreRefusedAndNothingIsWritten) {
  ImmediateCopyEngine engine;
  const Bytes source(10, std::byte{1});
  Bytes target(11, std::byte{2});
  EXPECT_THROW((void)engine.submit({.source = source, .target = target}), InvalidArgument);
  EXPECT_EQ(target, Bytes(11, std::byte{2}));
  EXPECT_THROW((void)engine.submit({.source = source, .target = {}}), InvalidArgument);
}

TEST(ImmediateCopyEngineTest, OverlappingBuffersAreRefused) {
  ImmediateCopyEngine engine;
  Bytes bytes(100);
  const std::span all(bytes);
  EXPECT_THROW((void)engine.submit({.source = all.first(60), .target = all.last(60)}),
               InvalidArgument);
  EXPECT_THROW((void)engine.submit({.source = all, .target = all}), InvalidArgument);
  EXPECT_NO_THROW((void)engine.submit({.source = all.first(50), .target = all.last(50)}));
}

TEST(ImmediateCopyEngineTest, TicketsGrowAndUnknownOnesAreRefused) {
  ImmediateCopyEngine engine;
  const Bytes source(8);
  Bytes target(8);
  EXPECT_TRUE(engine.done(CopyTicket::kNone));
  const auto submit = [&](CopyDirection direction) {
    return engine.submit({.source = source, .target = target, .direction = direction});
  };
  const CopyTicket first = submit(CopyDirection::kHostToDevice);
  const CopyTicket second = submit(CopyDirection::kDeviceToHost);
  EXPECT_LT(CopyTicket::kNone, first);
  EXPECT_LT(first, second);
  EXPECT_THROW(engine.wait(CopyTicket{3}), InvalidArgument);
  EXPECT_THROW((void)engine.done(CopyTicket{3}), InvalidArgument);
}

TEST(ImmediateCopyEngineTest, ACopyAwaitsItsSourceAndFailsWithIt) {
  ImmediateCopyEngine engine;
  Bytes source(64);
  Bytes target(64);
  const CopyTicket ticket = engine.submit({.source = source, .target = target, .await_source = [&] {
                                             std::fill(source.begin(), source.end(), std::byte{9});
                                           }});
  EXPECT_EQ(target, Bytes(64, std::byte{9}));
  EXPECT_THROW((void)engine.submit({.source = source,
                                    .target = target,
                                    .await_source = [] { throw std::runtime_error("spoilt"); }}),
               std::runtime_error);
  EXPECT_EQ(engine.submit({.source = source, .target = target}),
            CopyTicket{static_cast<std::uint64_t>(ticket) + 1})
      << "the failed copy got a ticket";
}

TEST(ImmediateCopyEngineTest, ConcurrentHammerGivesEveryCopyItsOwnTicket) {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kCopies = 100;
  ImmediateCopyEngine engine;
  std::vector<std::vector<CopyTicket>> tickets(kThreads);
  std::atomic<std::size_t> num_wrong{0};
  {
    std::vector<std::jthread> threads;
    for (std::size_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const Bytes source = random_bytes(50'000 + thread, static_cast<unsigned>(thread));
        for (std::size_t i = 0; i < kCopies; ++i) {
          Bytes target(source.size());
          tickets[thread].push_back(engine.submit({.source = source, .target = target}));
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
