#include "parallel/async_copy_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <latch>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/random_bytes.h"

namespace castor {
namespace {

using testing::random_bytes;

using Bytes = std::vector<std::byte>;

constexpr auto kToDevice = CopyDirection::kHostToDevice;
constexpr auto kToHost = CopyDirection::kDeviceToHost;

void plain_copy(const CopyRequest& request) {
  std::memcpy(request.target.data(), request.source.data(), request.source.size());
}

TEST(AsyncCopyEngineTest, CopiesExactlyTheBytesAskedFor) {
  AsyncCopyEngine engine;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1} << 20}) {
    const Bytes source = random_bytes(bytes, 1);
    Bytes target(bytes + 2, std::byte{0xee});  // a guard on either side
    engine.wait(engine.submit(
        {.source = source, .target = std::span(target).subspan(1, bytes), .direction = kToHost}));
    EXPECT_TRUE(std::equal(source.begin(), source.end(), target.begin() + 1));
    EXPECT_EQ(target.front(), std::byte{0xee});
    EXPECT_EQ(target.back(), std::byte{0xee});
  }
}

TEST(AsyncCopyEngineTest, ACopyAwaitsItsSourceBesideTheCaller) {
  std::latch gate(1);
  Bytes source(64);
  Bytes target(64);
  AsyncCopyEngine engine;
  const CopyTicket ticket = engine.submit(
      {.source = source, .target = target, .direction = kToDevice, .await_source = [&] {
         gate.wait();
       }});
  EXPECT_FALSE(engine.done(ticket));
  source.assign(64, std::byte{9});
  gate.count_down();
  engine.wait(ticket);
  EXPECT_EQ(target, Bytes(64, std::byte{9}));
}

TEST(AsyncCopyEngineTest, ASourceThatNeverComesIsTheCopysFailure) {
  const Bytes source(64, std::byte{1});
  Bytes target(64);
  AsyncCopyEngine engine;
  const CopyTicket ticket = engine.submit(
      {.source = source, .target = target, .direction = kToDevice, .await_source = [] {
         throw std::runtime_error("no source");
       }});
  EXPECT_THROW(engine.wait(ticket), std::runtime_error);
  EXPECT_EQ(target, Bytes(64));
}

TEST(AsyncCopyEngineTest, SubmitReturnsBeforeTheCopyIsMade) {
  std::latch gate(1);
  AsyncCopyEngine engine({.copy = [&](const CopyRequest& request) {
    gate.wait();
    plain_copy(request);
  }});
  const Bytes source(64, std::byte{7});
  Bytes target(64);
  const CopyTicket ticket = engine.submit({.source = source, .target = target});
  EXPECT_FALSE(engine.done(ticket));
  EXPECT_EQ(target, Bytes(64));
  gate.count_down();
  engine.wait(ticket);
  EXPECT_TRUE(engine.done(ticket));
  EXPECT_EQ(target, source);
}

TEST(AsyncCopyEngineTest, OneDirectionKeepsItsOrderAndTheOtherDoesNotWaitForIt) {
  std::latch gate(1);
  AsyncCopyEngine engine({.copy = [&](const CopyRequest& request) {
    if (request.direction == kToDevice) {
      gate.wait();
    }
    plain_copy(request);
  }});
  const Bytes first(32, std::byte{1});
  const Bytes second(32, std::byte{2});
  Bytes device(32);
  Bytes host(32);
  const CopyTicket early = engine.submit({.source = first, .target = device});
  const CopyTicket late = engine.submit({.source = second, .target = device});
  engine.wait(engine.submit({.source = first, .target = host, .direction = kToHost}));
  EXPECT_EQ(host, first);
  EXPECT_FALSE(engine.done(early));
  gate.count_down();
  engine.wait(late);
  EXPECT_TRUE(engine.done(early));
  EXPECT_EQ(device, second);
}

TEST(AsyncCopyEngineTest, AFailureBelongsToItsTicketOnly) {
  std::atomic<int> calls{0};
  AsyncCopyEngine engine({.copy = [&](const CopyRequest& request) {
    if (++calls == 2) {
      throw std::runtime_error("the link is gone");
    }
    plain_copy(request);
  }});
  const Bytes source(16, std::byte{3});
  std::vector<Bytes> targets(3, Bytes(16));
  std::vector<CopyTicket> tickets;
  for (Bytes& target : targets) {
    tickets.push_back(engine.submit({.source = source, .target = target}));
  }
  engine.wait(tickets[2]);
  EXPECT_THROW(engine.wait(tickets[1]), std::runtime_error);
  EXPECT_THROW(engine.wait(tickets[1]), std::runtime_error);
  EXPECT_TRUE(engine.done(tickets[1]));
  EXPECT_NO_THROW(engine.wait(tickets[0]));
  EXPECT_EQ(targets[0], source);
  EXPECT_EQ(targets[1], Bytes(16));
  EXPECT_EQ(targets[2], source);
}

TEST(AsyncCopyEngineTest, DestructionCompletesWhatWasSubmitted) {
  const Bytes source = random_bytes(4096, 2);
  std::vector<Bytes> targets(50, Bytes(4096));
  {
    AsyncCopyEngine engine;
    for (Bytes& target : targets) {
      static_cast<void>(engine.submit({.source = source, .target = target}));
    }
  }
  EXPECT_EQ(std::count(targets.begin(), targets.end(), source), 50);
}

TEST(AsyncCopyEngineTest, NothingToWaitForIsDone) {
  AsyncCopyEngine engine;
  EXPECT_TRUE(engine.done(CopyTicket::kNone));
  EXPECT_NO_THROW(engine.wait(CopyTicket::kNone));
}

TEST(AsyncCopyEngineTest, TicketsThatWereNeverGivenOutAreRefused) {
  AsyncCopyEngine engine;
  for (const std::uint64_t value : {1u, 2u, 3u, 1000u}) {
    EXPECT_THROW(engine.wait(CopyTicket{value}), InvalidArgument) << value;
    EXPECT_THROW(static_cast<void>(engine.done(CopyTicket{value})), InvalidArgument) << value;
  }
}

TEST(AsyncCopyEngineTest, BadRequestsAreRefusedAtOnce) {
  AsyncCopyEngine engine;
  Bytes bytes(16);
  const std::span<std::byte> all(bytes);
  EXPECT_THROW(static_cast<void>(engine.submit({.source = all, .target = all.subspan(1)})),
               InvalidArgument);
  EXPECT_THROW(
      static_cast<void>(engine.submit({.source = all.first(8), .target = all.subspan(7, 8)})),
      InvalidArgument);
}

TEST(AsyncCopyEngineTest, AnEmulatedLinkIsNoFasterThanItsBandwidth) {
  AsyncCopyEngine engine({.bytes_per_second = 100'000'000});
  const Bytes source(1'000'000);
  std::vector<Bytes> targets(3, Bytes(1'000'000));
  const auto start = std::chrono::steady_clock::now();
  CopyTicket last = CopyTicket::kNone;
  for (Bytes& target : targets) {
    last = engine.submit({.source = source, .target = target});
  }
  engine.wait(last);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(30));
}

TEST(AsyncCopyEngineTest, ThreadsHammeringItEachSeeTheirOwnBytes) {
  AsyncCopyEngine engine;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      Bytes target(512);
      for (int i = 0; i < 500; ++i) {
        const Bytes source = random_bytes(512, static_cast<unsigned>(random()));
        engine.wait(engine.submit({.source = source,
                                   .target = target,
                                   .direction = random() % 2 == 0 ? kToDevice : kToHost}));
        wrong += target == source ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace castor
