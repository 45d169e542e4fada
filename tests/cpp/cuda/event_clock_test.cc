#include "cuda/event_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "cuda/cuda_error.h"
#include "cuda/fake_cuda_runtime.h"
#include "cuda/stream_order.h"

namespace castor::cuda {
namespace {

using testing::FakeCuda;

constexpr std::uint64_t kMicrosecond = 1000;
constexpr std::uint64_t kMillisecond = 1000 * kMicrosecond;

class EventClockTest : public ::testing::Test {
 protected:
  void mark() { clock_->mark(stream_id(compute_)); }
  void launch(std::uint64_t takes_ns) { fake_.enqueue(compute_, {}, takes_ns); }
  /// The times of all marks, when the device has done all.
  [[nodiscard]] std::vector<std::uint64_t> times() {
    fake_.run_all();
    EXPECT_TRUE(clock_->passed());
    return {clock_->times_ns().begin(), clock_->times_ns().end()};
  }

  FakeCuda fake_;
  cudaStream_t compute_ = fake_.new_stream();
  std::optional<EventClock> clock_{0};
};

TEST_F(EventClockTest, AKernelThatIsLongerThanItsLaunchIsSeenAsLong) {
  mark();
  fake_.host_takes(10 * kMicrosecond);
  launch(5 * kMillisecond);
  mark();
  EXPECT_EQ(times(), (std::vector<std::uint64_t>{0, 5 * kMillisecond + 10 * kMicrosecond}));
}

TEST_F(EventClockTest, AChainOfShortKernelsTakesTheTimeOfItsLaunches) {
  mark();
  for (int kernel = 0; kernel < 100; ++kernel) {
    fake_.host_takes(10 * kMicrosecond);
    launch(2 * kMicrosecond);
  }
  mark();
  EXPECT_EQ(times(), (std::vector<std::uint64_t>{0, 1002 * kMicrosecond}));
}

TEST_F(EventClockTest, TheHostNeverWaits) {
  mark();
  launch(kMillisecond);
  mark();
  EXPECT_FALSE(clock_->passed());
  EXPECT_TRUE(fake_.step(compute_));  // the first mark
  EXPECT_FALSE(clock_->passed());
  EXPECT_EQ(clock_->times_ns().size(), 1u);
  EXPECT_EQ(times(), (std::vector<std::uint64_t>{0, kMillisecond}));
  EXPECT_EQ(fake_.num_calls("cudaEventSynchronize"), 0u);
  EXPECT_EQ(fake_.num_calls("cudaStreamSynchronize"), 0u);
}

TEST_F(EventClockTest, WithoutMarksThereIsNothingToComeTo) {
  EXPECT_TRUE(clock_->passed());
  EXPECT_TRUE(clock_->times_ns().empty());
}

TEST_F(EventClockTest, TheModelMayMoveToAnotherStream) {
  mark();
  launch(kMillisecond);
  const cudaStream_t other = fake_.new_stream();
  order_streams(0, stream_id(compute_), stream_id(other));
  fake_.enqueue(other, {}, 3 * kMillisecond);
  clock_->mark(stream_id(other));
  EXPECT_EQ(times(), (std::vector<std::uint64_t>{0, 4 * kMillisecond}));
}

TEST_F(EventClockTest, ALongStepLosesNoMicrosecond) {
  mark();
  launch(3600 * 1000 * kMillisecond);
  mark();
  launch(kMicrosecond);
  mark();
  const std::vector<std::uint64_t> all = times();
  EXPECT_EQ(all[2] - all[1], kMicrosecond);
}

TEST_F(EventClockTest, StepsAfterTheFirstMakeNoEvents) {
  std::size_t made = 0;
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 700; ++i) {
      mark();
      launch(kMicrosecond);
    }
    EXPECT_EQ(times().back(), 699 * kMicrosecond);
    clock_->forget();
    EXPECT_TRUE(step == 0 || fake_.num_live_events() == made);
    made = fake_.num_live_events();
  }
  EXPECT_EQ(made, fake_.num_calls("cudaEventCreateWithFlags"));
}

TEST_F(EventClockTest, EventsAreReusedWithinAStepWhereTheDeviceKeepsUp) {
  for (int i = 0; i < 10'000; ++i) {
    mark();
    launch(kMicrosecond);
    fake_.run_all();
  }
  EXPECT_LE(fake_.num_live_events(), 300u);
  EXPECT_EQ(times().size(), 10'000u);
  EXPECT_EQ(times().back(), 9'999 * kMicrosecond);
}

TEST_F(EventClockTest, ForgettingMarksThatAreUnderWayTakesTheirEventsBack) {
  for (int i = 0; i < 10; ++i) {
    mark();
    launch(kMillisecond);
  }
  clock_->forget();
  EXPECT_TRUE(clock_->times_ns().empty());
  mark();
  launch(2 * kMillisecond);
  mark();
  EXPECT_EQ(times(), (std::vector<std::uint64_t>{0, 2 * kMillisecond}));
  EXPECT_EQ(fake_.num_live_events(), 10u);
}

TEST_F(EventClockTest, WhatCudaRefusesIsAnErrorAndNoMark) {
  mark();
  for (const char* const call : {"cudaEventCreateWithFlags", "cudaEventRecord"}) {
    fake_.fail_call(call, 1, cudaErrorIllegalAddress);
    EXPECT_THROW(mark(), CudaError);
  }
  launch(kMillisecond);
  mark();
  fake_.run_all();
  fake_.fail_call("cudaEventElapsedTime", 1, cudaErrorIllegalAddress);
  EXPECT_THROW(static_cast<void>(clock_->passed()), CudaError);
  EXPECT_EQ(times(), (std::vector<std::uint64_t>{0, kMillisecond}));
}

TEST_F(EventClockTest, AFailedDeviceIsAnErrorAndNotATime) {
  mark();
  fake_.break_device(cudaErrorIllegalAddress);
  EXPECT_THROW(static_cast<void>(clock_->passed()), CudaError);
  clock_->forget();
}

TEST_F(EventClockTest, NoEventOutlivesTheClock) {
  for (int i = 0; i < 20; ++i) {
    mark();
  }
  fake_.run_all();
  EXPECT_TRUE(clock_->passed());
  mark();
  clock_.reset();
  EXPECT_EQ(fake_.num_live_events(), 0u);
}

// Against the time of a device that does what it is given in order: marks made, read and forgotten
// at random times.
TEST_F(EventClockTest, TellsTheDevicesTimeWheneverItIsLookedAt) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    clock_->forget();
    fake_.run_all();
    fake_.host_takes(1000 * kMillisecond);  // longer than what the device did before
    std::uint64_t host = 0;
    std::uint64_t device = 0;
    std::vector<std::uint64_t> expected;
    for (int act = 0; act < 2000; ++act) {
      const std::uint64_t time = random() % 100 * kMicrosecond;
      switch (random() % 5) {
        case 0:
          host += time;
          fake_.host_takes(time);
          break;
        case 1:
          device = std::max(device, host) + time;
          launch(time);
          break;
        case 2: static_cast<void>(fake_.step(compute_)); break;
        case 3: static_cast<void>(clock_->passed()); break;
        default:
          device = std::max(device, host);
          expected.push_back(device);
          mark();
      }
    }
    for (std::size_t i = expected.size(); i-- > 0;) {
      expected[i] -= expected[0];
    }
    EXPECT_EQ(times(), expected);
  }
}

}  // namespace
}  // namespace castor::cuda
