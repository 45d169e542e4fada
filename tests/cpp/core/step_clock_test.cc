#include "core/step_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/machine.h"
#include "core/steps.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

constexpr std::uint64_t kMicrosecond = 1000;
constexpr std::uint64_t kMillisecond = 1000 * kMicrosecond;
constexpr std::size_t kChunk = Net::kChunk;

/// A host and a device that works beside it, in simulated time. The device does what it is given in
/// order, not before it is given. A byte that is fetched takes a nanosecond, for which the device
/// waits.
struct SimulatedTime {
  std::uint64_t host_ns = 0;
  std::uint64_t device_ns = 0;  // when the device has done what it was given
  std::uint64_t waited_ns = 0;  // for copies

  void host_takes(std::uint64_t nanoseconds) { host_ns += nanoseconds; }
  void launch(std::uint64_t nanoseconds) { device_ns = std::max(device_ns, host_ns) + nanoseconds; }
  void wait_for_copies(std::uint64_t nanoseconds) {
    device_ns = std::max(device_ns, host_ns) + nanoseconds;
    waited_ns += nanoseconds;
  }
};

/// The clock of such a device.
class SimulatedClock final : public DeviceClock {
 public:
  SimulatedClock(SimulatedTime& time, const ChunkManager& manager)
      : time_(time), manager_(manager) {}

  void mark(StreamId /*stream*/) override {
    if (--marks_left_ == 0) {
      throw InjectedFailure("mark");
    }
    const std::uint64_t fetched = manager_.counts().h2d_bytes;
    time_.wait_for_copies(fetched - std::exchange(fetched_, fetched));
    at_ns_.push_back(time_.device_ns);
  }
  [[nodiscard]] bool passed() override {
    const bool all = !at_ns_.empty() && at_ns_.back() <= time_.host_ns;
    if (all) {
      since_first_ns_ = at_ns_;
      for (std::uint64_t& at : since_first_ns_) {
        at -= at_ns_.front();
      }
    }
    return all;
  }
  [[nodiscard]] std::span<const std::uint64_t> times_ns() const noexcept override {
    return since_first_ns_;
  }
  void forget() noexcept override { at_ns_.clear(); }

  /// Refuses the n-th mark from now on.
  void refuse(std::size_t n) { marks_left_ = n; }
  [[nodiscard]] std::size_t num_marks() const { return at_ns_.size(); }

 private:
  SimulatedTime& time_;
  const ChunkManager& manager_;
  std::uint64_t fetched_ = 0;
  std::vector<std::uint64_t> at_ns_;
  std::vector<std::uint64_t> since_first_ns_;
  std::size_t marks_left_ = kNever;
};

struct Bench : SimulatedMachine {
  SimulatedTime time;
  SimulatedClock* clock = nullptr;

  Bench(ChunkLayout layout, std::size_t device_bytes, RuntimeOptions options = {})
      : SimulatedMachine(std::move(layout), device_bytes, options) {
    auto own = std::make_unique<SimulatedClock>(time, *rig.manager);
    clock = own.get();
    work_by(std::move(own), options);
  }

  void finish() {
    runtime->begin_update();
    runtime->finish_step();
  }
  /// The host comes to the time at which the device has done all.
  void await_device() { time.host_ns = std::max(time.host_ns, time.device_ns); }
  DeviceTimes device_times() {
    await_device();
    return runtime->timeline().device_times;
  }
};

std::uint64_t computed(const DeviceTimes& times) {
  return std::accumulate(
      times.events.begin(), times.events.end(), std::uint64_t{0},
      [](std::uint64_t sum, const DeviceTime& time) { return sum + time.compute_ns; });
}

TEST(StepClockTest, AKernelThatIsLongerThanItsLaunchIsSeenAsLong) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run({enter(0)});
  bench.time.host_takes(10 * kMicrosecond);
  bench.time.launch(5 * kMillisecond);
  bench.run({exit(0), backward(0), grad(0)});
  bench.finish();
  const DeviceTimes times = bench.device_times();
  ASSERT_EQ(times.events.size(), 4u);
  // The device waits for the launch, and computes.
  EXPECT_EQ(times.events[0].compute_ns, 5 * kMillisecond + 10 * kMicrosecond - kChunk);
  EXPECT_EQ(times.events[1].reached_ns, 5 * kMillisecond + 10 * kMicrosecond);
  EXPECT_EQ(times.end_ns, times.events[1].reached_ns) << "nothing was given since";
}

TEST(StepClockTest, AChainOfShortKernelsTakesTheTimeOfItsLaunches) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run({enter(0), exit(0), backward(0)});
  for (int kernel = 0; kernel < 100; ++kernel) {
    bench.time.host_takes(10 * kMicrosecond);
    bench.time.launch(2 * kMicrosecond);
  }
  bench.run({grad(0)});
  bench.finish();
  const DeviceTimes times = bench.device_times();
  EXPECT_EQ(times.events[2].compute_ns, 1002 * kMicrosecond - kChunk);
}

TEST(StepClockTest, LaunchesBehindALongKernelTakeNoTimeOfTheirOwn) {
  Bench bench(Net::row(2).layout(), 4 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  bench.run({enter(0)});
  bench.time.launch(kMillisecond);
  bench.run({exit(0), enter(1)});
  for (int kernel = 0; kernel < 50; ++kernel) {  // half a millisecond of launches
    bench.time.host_takes(10 * kMicrosecond);
    bench.time.launch(kMicrosecond);
  }
  bench.run({exit(1), backward(1), grad(1), backward(0), grad(0)});
  bench.finish();
  const DeviceTimes times = bench.device_times();
  EXPECT_EQ(times.events[0].compute_ns, kMillisecond);
  EXPECT_EQ(times.events[2].compute_ns, 50 * kMicrosecond);
}

TEST(StepClockTest, WaitsForChunksAreNotComputing) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run({enter(0)});
  bench.time.launch(70);
  bench.run({exit(0), backward(0), grad(0)});
  bench.finish();
  const DeviceTimes times = bench.device_times();
  EXPECT_EQ(bench.time.waited_ns, kChunk);
  EXPECT_EQ(times.events[0].reached_ns, 0u);
  EXPECT_EQ(times.events[0].compute_ns, 70u);
  EXPECT_EQ(times.events[1].reached_ns, kChunk + 70u);
  EXPECT_EQ(computed(times), 70u);
}

TEST(StepClockTest, WhatTheOptimizerDoesIsNotOfTheLastEvent) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run(row_step(1));
  bench.runtime->begin_update();
  bench.time.launch(kMillisecond);
  bench.runtime->finish_step();
  const DeviceTimes times = bench.device_times();
  EXPECT_EQ(times.end_ns, kChunk);
  EXPECT_EQ(computed(times), 0u);
}

TEST(StepClockTest, StepsByPlanAreTimedWhereItIsAskedFor) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  EXPECT_FALSE(bench.runtime->device_times_pending());
  bench.run(row_step(1));
  EXPECT_EQ(bench.clock->num_marks(), 6u);  // two for each access, one for exit and gradients
  bench.finish();
  EXPECT_EQ(bench.clock->num_marks(), 7u);
  EXPECT_TRUE(bench.runtime->device_times_pending());
  EXPECT_EQ(bench.device_times().events.size(), 4u);
  EXPECT_FALSE(bench.runtime->device_times_pending());
  EXPECT_EQ(bench.clock->num_marks(), 0u) << "the marks are free again";
  for (int step = 0; step < 4; ++step) {
    const bool asked = step == 2;
    if (asked) {
      EXPECT_TRUE(bench.runtime->time_next_step());
    }
    bench.run(row_step(1));
    EXPECT_EQ(bench.clock->num_marks() > 0, asked);
    bench.finish();
    EXPECT_EQ(bench.device_times().events.size(), asked ? 4u : 0u);
  }
}

TEST(StepClockTest, ADeviceWithoutAClockIsNeverTimed) {
  SimulatedMachine machine(Net::row(1).layout(), 2 * kChunk);
  EXPECT_FALSE(machine.runtime->time_next_step());
  machine.run(row_step(1));
  machine.runtime->finish_step();
  EXPECT_FALSE(machine.runtime->device_times_pending());
  EXPECT_TRUE(machine.runtime->timeline().device_times.events.empty());
}

TEST(StepClockTest, TimesAreThereWhenTheDeviceHasComeToTheEnd) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run({enter(0)});
  bench.time.launch(kMillisecond);
  bench.run({exit(0), backward(0), grad(0)});
  bench.finish();
  EXPECT_TRUE(bench.runtime->timeline().device_times.events.empty()) << "it does not wait";
  EXPECT_TRUE(bench.runtime->device_times_pending());
  EXPECT_EQ(bench.device_times().events[0].compute_ns, kMillisecond);
  EXPECT_EQ(bench.device_times().events[0].compute_ns, kMillisecond) << "they stay";
}

TEST(StepClockTest, TimesThatNobodyTookAreDroppedByTheNextStep) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run(row_step(1));
  bench.finish();
  bench.run({enter(0)});  // by plan
  EXPECT_EQ(bench.device_times().events.size(), 4u) << "of the last finished one";
  bench.run({exit(0), backward(0), grad(0)});
  bench.finish();
  EXPECT_TRUE(bench.device_times().events.empty());

  ASSERT_TRUE(bench.runtime->time_next_step());
  bench.run(row_step(1));
  bench.finish();
  bench.run(row_step(1));
  bench.finish();
  EXPECT_FALSE(bench.runtime->device_times_pending());
  EXPECT_EQ(bench.clock->num_marks(), 0u);
}

TEST(StepClockTest, AStepWithoutModulesLeavesTheTimesOfTheLastOne) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run(row_step(1));
  bench.finish();
  bench.finish();
  EXPECT_EQ(bench.device_times().events.size(), 4u);
}

TEST(StepClockTest, AModuleThatFindsNoRoomComputesNothing) {
  Bench bench(Net::row(2).layout(), 2 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  bench.run({enter(0), allocate(kChunk)});
  EXPECT_THROW(bench.run({enter(1)}), OutOfMemory);
  bench.time.launch(300);  // whatever the caller does about it
  bench.run({release(kChunk), exit(0), enter(0), exit(0), backward(0), grad(0)});
  bench.finish();
  const Timeline step = bench.runtime->timeline();
  const DeviceTimes times = bench.device_times();
  ASSERT_EQ(times.events.size(), step.bytes.size());
  EXPECT_EQ(times.events[1].compute_ns, 0u);
  EXPECT_EQ(times.events[2].reached_ns - times.events[1].reached_ns, 300u);
}

TEST(StepClockTest, AMarkThatIsRefusedIsAnErrorAndLeavesNothing) {
  const std::size_t marks = 7;
  for (std::size_t refused = 1; refused <= marks; ++refused) {
    SCOPED_TRACE(refused);
    Bench bench(Net::row(1).layout(), 2 * kChunk);
    bench.clock->refuse(refused);
    std::size_t failures = 0;
    const auto attempt = [&failures](const auto& act) {
      try {
        act();
      } catch (const InjectedFailure&) {
        ++failures;
      }
    };
    attempt([&] { bench.run(row_step(1)); });
    attempt([&] { bench.runtime->begin_update(); });
    bench.runtime->finish_step();
    EXPECT_EQ(failures, 1u);
    bench.clock->refuse(kNever);
    const DeviceTimes times = bench.device_times();
    const std::size_t events = bench.runtime->timeline().bytes.size();
    EXPECT_TRUE(times.events.empty() || times.events.size() == events);
    EXPECT_LE(computed(times), times.end_ns);
    for (const DeviceTime& time : times.events) {
      EXPECT_LE(time.reached_ns, times.end_ns);
    }
    ASSERT_TRUE(bench.runtime->time_next_step());
    bench.run(row_step(1));
    bench.finish();
    EXPECT_EQ(bench.device_times().events.size(), 4u);
    EXPECT_EQ(bench.clock->num_marks(), 0u);
  }
}

// In any step: what the device computed and waited for is all of its time, and where the host is
// quicker than the device, an event's time is that of the kernels which it launched.
TEST(StepClockTest, TimesAddUpInRandomSteps) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const Net net = random_net(random);
    const Step step = random_step(net, random);
    ChunkLayout layout = net.layout();
    const std::size_t bytes = layout.largest_working_set_bytes() + 6000;
    Bench bench(std::move(layout), bytes);
    for (const bool host_is_quick : {true, false, true, false}) {
      ASSERT_TRUE(bench.runtime->time_next_step());
      bench.await_device();
      const std::uint64_t begin_ns = bench.time.host_ns;
      const std::uint64_t waited_before = bench.time.waited_ns;
      std::vector<std::uint64_t> launched;
      for (const Act& act : step) {
        bench.act(act);
        launched.resize(bench.runtime->num_events(), 0);
        if (random() % 2 == 0) {
          bench.time.host_takes(host_is_quick ? 0 : random() % 1000);
          const std::uint64_t kernel = random() % 1000;
          bench.time.launch(kernel);
          launched.back() += kernel;
        }
      }
      bench.finish();
      const DeviceTimes times = bench.device_times();
      const std::uint64_t waited = bench.time.waited_ns - waited_before;
      ASSERT_EQ(times.events.size(), launched.size());
      EXPECT_EQ(computed(times) + waited, times.end_ns);
      EXPECT_EQ(times.end_ns, bench.time.device_ns - begin_ns);
      for (std::size_t i = 0; i < launched.size(); ++i) {
        if (host_is_quick) {
          EXPECT_EQ(times.events[i].compute_ns, launched[i]) << "event " << i;
        } else {
          EXPECT_GE(times.events[i].compute_ns, launched[i]) << "event " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace castor
