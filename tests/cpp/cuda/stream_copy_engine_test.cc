#include "cuda/stream_copy_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cuda/cuda_error.h"
#include "cuda/fake_cuda_runtime.h"
#include "cuda/stream_order.h"

namespace castor::cuda {
namespace {

using testing::FakeCuda;

constexpr std::size_t kBytes = 64;

struct Buffer {
  std::array<std::byte, kBytes> bytes{};
  [[nodiscard]] std::span<std::byte> span() { return bytes; }
  void fill(int value) { bytes.fill(static_cast<std::byte>(value)); }
  [[nodiscard]] bool holds(int value) const {
    return std::ranges::all_of(
        bytes, [=](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
};

class StreamCopyEngineTest : public ::testing::Test {
 protected:
  StreamCopyEngineTest() {
    for (Buffer& buffer : hosts_)
      fake_.add_pinned_memory(buffer.span());
    for (Buffer& buffer : slots_)
      fake_.add_device_memory(buffer.span(), 0);
    engine_.emplace(0);
  }

  CopyTicket copy_in(Buffer& slot, Buffer& host) {
    return engine_->submit({.source = host.span(),
                            .target = slot.span(),
                            .direction = CopyDirection::kHostToDevice,
                            .behind = stream_id(compute_),
                            .await_source = {}});
  }
  CopyTicket copy_out(Buffer& host, Buffer& slot) {
    return engine_->submit({.source = slot.span(),
                            .target = host.span(),
                            .direction = CopyDirection::kDeviceToHost,
                            .behind = stream_id(compute_),
                            .await_source = {}});
  }
  void order(CopyTicket ticket) { engine_->order(ticket, stream_id(compute_)); }
  void release(std::span<const std::byte> slot) { engine_->release(slot, stream_id(compute_)); }
  /// Lets the copy streams go as far as they can, while the compute stream stands still.
  void run_copies() {
    for (bool moved = true; moved;) {
      moved = false;
      for (const cudaStream_t stream : fake_.streams())
        moved |= stream != compute_ && fake_.step(stream);
    }
  }
  void run_compute() {
    while (fake_.step(compute_)) {
    }
  }

  FakeCuda fake_;
  cudaStream_t compute_ = fake_.new_stream();
  std::array<Buffer, 4> hosts_;
  std::array<Buffer, 4> slots_;
  std::optional<StreamCopyEngine> engine_;
};

TEST_F(StreamCopyEngineTest, OrderingACopyInHoldsTheComputeStreamAndNotTheHost) {
  hosts_[0].fill(7);
  const CopyTicket ticket = copy_in(slots_[0], hosts_[0]);
  order(ticket);
  EXPECT_FALSE(engine_->done(ticket));  // the host did not wait
  bool saw = false;
  fake_.enqueue(compute_, [&] { saw = slots_[0].holds(7); });
  fake_.run_all();
  EXPECT_TRUE(saw);
  EXPECT_TRUE(engine_->done(ticket));
}

TEST_F(StreamCopyEngineTest, AWaitForACopyOutIsTheHosts) {
  fake_.enqueue(compute_, [&] { slots_[0].fill(9); });
  engine_->wait(copy_out(hosts_[0], slots_[0]));
  EXPECT_TRUE(hosts_[0].holds(9));
}

TEST_F(StreamCopyEngineTest, ACopyInWaitsForTheComputeSubmittedBefore) {
  hosts_[0].fill(1);
  hosts_[1].fill(2);
  order(copy_in(slots_[0], hosts_[0]));
  bool saw = false;
  fake_.enqueue(compute_, [&] { saw = slots_[0].holds(1); });
  const CopyTicket next = copy_in(slots_[0], hosts_[1]);  // the slot's next user
  run_copies();
  EXPECT_FALSE(engine_->done(next));
  fake_.run_all();
  EXPECT_TRUE(saw);
  EXPECT_TRUE(slots_[0].holds(2));
}

TEST_F(StreamCopyEngineTest, AReleasedSlotDoesNotWaitForLaterCompute) {
  fake_.enqueue(compute_, [] {});
  release(slots_[0].span());
  run_compute();
  fake_.enqueue(compute_, [] {});  // somebody else's
  const CopyTicket ticket = copy_in(slots_[0], hosts_[0]);
  run_copies();
  EXPECT_TRUE(engine_->done(ticket));
}

TEST_F(StreamCopyEngineTest, AReleasedSlotWaitsForItsOwnCompute) {
  hosts_[0].fill(2);
  slots_[0].fill(1);
  bool saw = false;
  fake_.enqueue(compute_, [&] { saw = slots_[0].holds(1); });
  release(slots_[0].span());
  const CopyTicket ticket = copy_in(slots_[0], hosts_[0]);
  run_copies();
  EXPECT_FALSE(engine_->done(ticket));
  fake_.run_all();
  EXPECT_TRUE(saw);
}

TEST_F(StreamCopyEngineTest, AReleaseServesOneCopy) {
  release(slots_[0].span());
  const CopyTicket first = copy_in(slots_[0], hosts_[0]);
  fake_.enqueue(compute_, [] {});
  const CopyTicket second = copy_in(slots_[0], hosts_[1]);
  EXPECT_FALSE(engine_->done(first));  // it waits for the (empty) compute stream's event
  EXPECT_TRUE(fake_.step(compute_));   // which comes before the kernel
  run_copies();
  EXPECT_TRUE(engine_->done(first));
  EXPECT_FALSE(engine_->done(second));
  fake_.run_all();
  EXPECT_TRUE(engine_->done(second));
}

TEST_F(StreamCopyEngineTest, AForgottenReleaseDoesNotCount) {
  release(slots_[0].span());
  run_compute();
  engine_->forget(slots_[0].span());
  fake_.enqueue(compute_, [] {});  // of whoever had the memory in between
  const CopyTicket ticket = copy_in(slots_[0], hosts_[0]);
  run_copies();
  EXPECT_FALSE(engine_->done(ticket));
}

TEST_F(StreamCopyEngineTest, AReleaseOfAPartDoesNotServeTheWhole) {
  release(slots_[0].span().first(kBytes / 2));
  run_compute();
  fake_.enqueue(compute_, [] {});
  const CopyTicket ticket = copy_in(slots_[0], hosts_[0]);
  run_copies();
  EXPECT_FALSE(engine_->done(ticket));
}

TEST_F(StreamCopyEngineTest, CopiesOfTheSameBytesKeepTheirOrderAcrossDirections) {
  hosts_[1].fill(5);
  fake_.enqueue(compute_, [&] { slots_[0].fill(4); });
  (void)copy_out(hosts_[0], slots_[0]);
  release(slots_[0].span());
  (void)copy_in(slots_[0], hosts_[1]);  // overwrites what the copy out reads
  (void)copy_in(slots_[1], hosts_[0]);  // reads what the copy out writes
  fake_.run_all();
  EXPECT_TRUE(hosts_[0].holds(4));
  EXPECT_TRUE(slots_[0].holds(5));
  EXPECT_TRUE(slots_[1].holds(4));
}

TEST_F(StreamCopyEngineTest, AWaitForACopyInIsTheHosts) {
  hosts_[0].fill(3);
  const CopyTicket ticket = copy_in(slots_[0], hosts_[0]);
  engine_->wait(ticket);
  EXPECT_TRUE(slots_[0].holds(3));
  engine_->wait(CopyTicket::kNone);
}

TEST_F(StreamCopyEngineTest, NothingIsDoneFromTheStart) {
  EXPECT_TRUE(engine_->done(CopyTicket::kNone));
  order(CopyTicket::kNone);
  EXPECT_EQ(fake_.num_queued(compute_), 0u);
}

TEST_F(StreamCopyEngineTest, ATicketNeverGivenOutIsRefused) {
  (void)copy_in(slots_[0], hosts_[0]);
  EXPECT_THROW(engine_->wait(CopyTicket{4}), InvalidArgument);
  EXPECT_THROW((void)engine_->done(CopyTicket{3}), InvalidArgument);
  EXPECT_THROW(order(CopyTicket{1}), InvalidArgument);
}

TEST_F(StreamCopyEngineTest, ZeroBytesAreACopyToo) {
  const CopyTicket ticket = engine_->submit(
      {.source = {}, .target = {}, .behind = stream_id(compute_), .await_source = {}});
  fake_.run_all();
  EXPECT_TRUE(engine_->done(ticket));
}

TEST_F(StreamCopyEngineTest, MemoryOfTheWrongKindIsRefusedByName) {
  Buffer pageable;
  Buffer elsewhere;
  fake_.add_device_memory(elsewhere.span(), 1);
  const auto message_of = [](const auto& submit) -> std::string {
    try {
      (void)submit();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message_of([&] { return copy_in(slots_[0], pageable); }).find("page-locked"),
            std::string::npos);
  EXPECT_NE(message_of([&] { return copy_in(elsewhere, hosts_[0]); }).find("memory of device 1"),
            std::string::npos);
  EXPECT_NE(message_of([&] { return copy_in(hosts_[1], hosts_[0]); }).find("no device memory"),
            std::string::npos);
}

TEST_F(StreamCopyEngineTest, ARefusedCopyIsNamedAndLeavesNothingBehind) {
  for (const char* call : {"cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent"}) {
    fake_.fail_call(call, 1, cudaErrorIllegalAddress);
    try {
      (void)copy_in(slots_[0], hosts_[0]);
      FAIL() << call;
    } catch (const CudaError& error) {
      EXPECT_NE(std::string(error.what()).find("cudaErrorIllegalAddress (700)"), std::string::npos);
      EXPECT_EQ(error.code(), cudaErrorIllegalAddress);
    }
  }
  hosts_[0].fill(6);
  engine_->wait(copy_in(slots_[0], hosts_[0]));  // the engine is as good as before
  EXPECT_TRUE(slots_[0].holds(6));
}

TEST_F(StreamCopyEngineTest, AFailureOfTheDeviceReachesEveryWait) {
  const CopyTicket in = copy_in(slots_[0], hosts_[0]);
  const CopyTicket out = copy_out(hosts_[1], slots_[1]);
  fake_.break_device(cudaErrorIllegalAddress);
  EXPECT_THROW(order(in), CudaError);
  EXPECT_THROW(engine_->wait(in), CudaError);
  EXPECT_THROW(engine_->wait(out), CudaError);
  EXPECT_THROW((void)engine_->done(in), CudaError);
}

TEST_F(StreamCopyEngineTest, DestructionDrainsAndFreesEverything) {
  hosts_[0].fill(8);
  fake_.enqueue(compute_, [] {});
  for (int i = 0; i < 20; ++i)
    (void)copy_in(slots_[i % 4], hosts_[0]);
  engine_.reset();
  for (const Buffer& slot : slots_)
    EXPECT_TRUE(slot.holds(8));
  EXPECT_EQ(fake_.num_live_events(), 0u);
  EXPECT_EQ(fake_.num_live_streams(), 1u);
}

TEST_F(StreamCopyEngineTest, EventsAreReused) {
  for (int i = 0; i < 200; ++i)
    engine_->wait(copy_in(slots_[0], hosts_[0]));
  EXPECT_LE(fake_.num_live_events(), 3u);
}

TEST_F(StreamCopyEngineTest, KeepsTheCallersDevice) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  order(copy_in(slots_[0], hosts_[0]));
  release(slots_[0].span());
  int device = 0;
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 1);
}

TEST_F(StreamCopyEngineTest, NeedsADevice) {
  EXPECT_THROW(StreamCopyEngine(9), CudaError);
  fake_.fail_call("cudaStreamCreateWithFlags", 2, cudaErrorMemoryAllocation);
  EXPECT_THROW(StreamCopyEngine(0), CudaError);
  EXPECT_EQ(fake_.num_live_streams(), 3u);  // of the one made refused, none is left
}

TEST_F(StreamCopyEngineTest, CopiesAreBehindTheStreamTheyName) {
  // An eviction by a thread on another stream: what counts is where the slot was used.
  const cudaStream_t side = fake_.new_stream();
  fake_.enqueue(compute_, [&] { slots_[0].fill(9); });
  const CopyTicket out = copy_out(hosts_[0], slots_[0]);
  while (fake_.step(side)) {
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (const cudaStream_t stream : fake_.streams())
      moved |= stream != compute_ && fake_.step(stream);
  }
  EXPECT_FALSE(engine_->done(out)) << "the slot was read before it was written";
  engine_->wait(out);
  EXPECT_TRUE(hosts_[0].holds(9));
}

TEST_F(StreamCopyEngineTest, OrderHoldsTheStreamThatItNamesAlone) {
  const cudaStream_t side = fake_.new_stream();
  hosts_[0].fill(4);
  engine_->order(copy_in(slots_[0], hosts_[0]), stream_id(side));
  bool saw = false;
  bool free = false;
  fake_.enqueue(side, [&] { saw = slots_[0].holds(4); });
  fake_.enqueue(compute_, [&] { free = true; });
  run_compute();
  EXPECT_TRUE(free);
  EXPECT_FALSE(fake_.step(side)) << "the copy has not run";
  fake_.run_all();
  EXPECT_TRUE(saw);
}

class StreamCopyEngineSourceTest : public StreamCopyEngineTest {
 protected:
  /// A copy into `slot` whose source is being written until finish_source().
  CopyTicket copy_in_later(Buffer& slot, Buffer& host) {
    return engine_->submit({.source = host.span(),
                            .target = slot.span(),
                            .direction = CopyDirection::kHostToDevice,
                            .behind = stream_id(compute_),
                            .await_source = [this] { written_.wait(); }});
  }
  void finish_source() { writer_.set_value(); }

  std::promise<void> writer_;
  std::shared_future<void> written_ = writer_.get_future().share();
};

TEST_F(StreamCopyEngineSourceTest, ASourceThatIsStillWrittenHoldsUpNeitherSubmitNorTheOtherLane) {
  const CopyTicket late = copy_in_later(slots_[0], hosts_[0]);
  fake_.enqueue(compute_, [&] { slots_[1].fill(4); });
  engine_->wait(copy_out(hosts_[1], slots_[1]));
  EXPECT_TRUE(hosts_[1].holds(4));
  EXPECT_FALSE(engine_->done(late));
  hosts_[0].fill(9);
  finish_source();
  engine_->wait(late);
  EXPECT_TRUE(slots_[0].holds(9));
}

TEST_F(StreamCopyEngineSourceTest, CopiesBehindItKeepTheirOrder) {
  (void)copy_in_later(slots_[0], hosts_[0]);
  hosts_[1].fill(2);
  const CopyTicket second = copy_in(slots_[0], hosts_[1]);
  hosts_[0].fill(1);
  finish_source();
  engine_->wait(second);
  EXPECT_TRUE(slots_[0].holds(2));
}

TEST_F(StreamCopyEngineSourceTest, ACopyBackOfTheSlotWaitsForIt) {
  (void)copy_in_later(slots_[0], hosts_[0]);
  const CopyTicket back = copy_out(hosts_[1], slots_[0]);
  EXPECT_FALSE(engine_->done(back));
  hosts_[0].fill(6);
  finish_source();
  engine_->wait(back);
  EXPECT_TRUE(hosts_[1].holds(6));
}

TEST_F(StreamCopyEngineSourceTest, OrderHoldsTheHostUntilTheCopyIsEnqueuedAndThenTheComputeStream) {
  const CopyTicket late = copy_in_later(slots_[0], hosts_[0]);
  std::jthread writer([this] {
    hosts_[0].fill(3);
    finish_source();
  });
  order(late);
  bool saw = false;
  fake_.enqueue(compute_, [&] { saw = slots_[0].holds(3); });
  fake_.run_all();
  EXPECT_TRUE(saw);
}

TEST_F(StreamCopyEngineSourceTest, ItIsBehindTheComputeSubmittedBeforeItAndNoLater) {
  const CopyTicket late = copy_in_later(slots_[0], hosts_[0]);
  fake_.enqueue(compute_, [] {});  // not before it
  finish_source();
  EXPECT_TRUE(fake_.step(compute_));  // the event of submit
  while (!engine_->done(late))
    run_copies();
  EXPECT_EQ(fake_.num_queued(compute_), 1u);
}

TEST_F(StreamCopyEngineSourceTest, ASourceThatFailsIsTheCopysFailureAndNotTheNextOnes) {
  const CopyTicket failed = engine_->submit({.source = hosts_[0].span(),
                                             .target = slots_[0].span(),
                                             .direction = CopyDirection::kHostToDevice,
                                             .behind = stream_id(compute_),
                                             .await_source = [] { throw Error("no update"); }});
  hosts_[1].fill(5);
  engine_->wait(copy_in(slots_[0], hosts_[1]));
  EXPECT_TRUE(slots_[0].holds(5));
  EXPECT_TRUE(engine_->done(failed));
  for (int i = 0; i < 2; ++i)
    EXPECT_THROW(order(failed), Error);
  EXPECT_THROW(engine_->wait(failed), Error);
}

TEST_F(StreamCopyEngineSourceTest, DestructionCompletesIt) {
  (void)copy_in_later(slots_[0], hosts_[0]);
  (void)copy_in(slots_[1], hosts_[0]);
  hosts_[0].fill(7);
  finish_source();
  engine_.reset();
  EXPECT_TRUE(slots_[0].holds(7) && slots_[1].holds(7));
  EXPECT_EQ(fake_.num_live_events(), 0u);
}

// What a training step does with slots, in random order, run by streams that take turns at random:
// compute must see what was fetched, host storage must see what compute wrote.
TEST_F(StreamCopyEngineTest, AnyScheduleOfTheStreamsGivesTheSameValues) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    std::array<int, 4> host{};  // what each host block holds once all is done
    for (std::size_t i = 0; i < 4; ++i)
      hosts_[i].fill(host[i] = static_cast<int>(i));
    int wrong = 0;
    int next_value = 10;
    for (int use = 0; use < 30; ++use) {
      Buffer& slot = slots_[random() % 4];
      const std::size_t h = random() % 4;
      if (random() % 4 == 0) {
        order(engine_->submit({.source = hosts_[h].span(),
                               .target = slot.span(),
                               .direction = CopyDirection::kHostToDevice,
                               .behind = stream_id(compute_),
                               .await_source = [] {}}));
      } else {
        order(copy_in(slot, hosts_[h]));
      }
      fake_.enqueue(compute_, [&wrong, &slot, want = host[h]] { wrong += !slot.holds(want); });
      if (random() % 3 == 0) {
        host[h] = next_value++;
        fake_.enqueue(compute_, [&slot, value = host[h]] { slot.fill(value); });
        (void)copy_out(hosts_[h], slot);  // not waited for: later copies in are ordered behind it
      }
      if (random() % 2 == 0)
        release(slot.span());
      const auto streams = fake_.streams();
      for (std::size_t steps = random() % 8; steps > 0; --steps)
        (void)fake_.step(streams[random() % streams.size()]);
    }
    fake_.run_all();
    ASSERT_EQ(wrong, 0) << "seed " << seed;
    for (std::size_t i = 0; i < 4; ++i)
      ASSERT_TRUE(hosts_[i].holds(host[i])) << "seed " << seed;
  }
}

TEST_F(StreamCopyEngineTest, TheHostWaitsForWhoeverReadsWhatItWrites) {
  hosts_[0].fill(7);
  const CopyTicket reader = copy_in(slots_[0], hosts_[0]);
  const CopyTicket other = copy_in(slots_[1], hosts_[1]);
  order(reader);
  engine_->synchronize_readers(hosts_[2].span());
  EXPECT_FALSE(engine_->done(reader)) << "nobody reads those bytes";
  engine_->synchronize_readers(std::span(hosts_[0].bytes).subspan(8, 4));
  EXPECT_TRUE(engine_->done(reader));
  EXPECT_TRUE(slots_[0].holds(7));
  fake_.run_all();
  EXPECT_TRUE(engine_->done(other));
}

TEST_F(StreamCopyEngineTest, AReaderThatWaitsForItsSourceIsNotWaitedFor) {
  std::promise<void> written;
  (void)engine_->submit({.source = hosts_[0].span(),
                         .target = slots_[0].span(),
                         .direction = CopyDirection::kHostToDevice,
                         .behind = stream_id(compute_),
                         .await_source = [&] { written.get_future().wait(); }});
  engine_->synchronize_readers(hosts_[0].span());  // as the writer does
  hosts_[0].fill(3);
  written.set_value();
  engine_.reset();
  EXPECT_TRUE(slots_[0].holds(3));
}

TEST_F(StreamCopyEngineTest, ManyThreadsMaySubmitAndWait) {
  std::array<std::jthread, 4> threads;
  for (std::size_t t = 0; t < threads.size(); ++t) {
    threads[t] = std::jthread([this, t] {
      for (int i = 0; i < 200; ++i) {
        const CopyTicket in = copy_in(slots_[t], hosts_[t]);
        release(slots_[t].span());
        if (i % 2 == 0) {
          order(in);
        } else {
          engine_->wait(in);
        }
        engine_->wait(copy_out(hosts_[t], slots_[t]));
      }
    });
  }
}

}  // namespace
}  // namespace castor::cuda
