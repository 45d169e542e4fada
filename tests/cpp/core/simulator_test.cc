#include "core/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "core/error.h"
#include "core/simulated_steps.h"
#include "core/units.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

// Chunk 0 arrives at 1, the others behind the compute: forward ends at 4, backward at 10, the last
// gradient is on the host at 11, three updates end at 14.
TEST(SimulatorTest, AmpleStepOverlapsCopiesAndUpdatesAtTheEnd) {
  const SimulatedStep step = simulate({.count = 3}, 3 * kChunk, unit_hardware(), fp32_adam());
  EXPECT_DOUBLE_EQ(step.step_seconds, 14.0);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kCompute), 9.0);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kH2d), 3.0);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kD2h), 3.0);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kDram), 3.0 + 6.0 * kChunk / kUpdateBytes);
  EXPECT_EQ(step.bound, Resource::kCompute);
  EXPECT_EQ(step.h2d_bytes, 3 * kChunk);
  EXPECT_EQ(step.d2h_bytes, 3 * kChunk);
  EXPECT_EQ(step.demand_fetches, 1u);
  EXPECT_EQ(step.evictions, 0u);
  EXPECT_EQ(step.peak_device_bytes, 3 * kChunk);
  // Parameters and gradients of 4 bytes, state of 8.
  EXPECT_EQ(step.host_bytes, 3 * Net::kWhole * 16);
}

// Synchronous: 3 fetches, 3 s forward, 3 x (2 s backward and 1 s gradient), 3 updates.
TEST(SimulatorTest, SynchronousCopiesStandInTheWayOfTheCompute) {
  Hardware hardware = unit_hardware();
  hardware.parameter_copies = CopyMode::kSynchronous;
  hardware.gradient_copies = CopyMode::kSynchronous;
  EXPECT_DOUBLE_EQ(simulate({.count = 3}, 3 * kChunk, hardware, fp32_adam()).step_seconds, 18.0);
}

// One slot and no prefetch: F0 F1 F2 | B2 hits, B1 B0 fetch again: 5 fetches of 1 s in the way.
TEST(SimulatorTest, TightBudgetFetchesAgain) {
  const SimulatedStep step = simulate({.count = 3}, kChunk, unit_hardware(), fp32_adam(), 0);
  EXPECT_EQ(step.demand_fetches, 5u);
  EXPECT_EQ(step.evictions, 4u);
  EXPECT_EQ(step.h2d_bytes, 5 * kChunk);
  EXPECT_EQ(step.peak_device_bytes, kChunk);
  EXPECT_DOUBLE_EQ(step.step_seconds, 5.0 + 9.0 + 1.0 + 3.0);
}

// Copies of 8 s: the third chunk is there at 24; from there 1 + 2 + 2 + 2, gradients are fast.
TEST(SimulatorTest, SlowLinkBoundsTheStep) {
  Hardware hardware = unit_hardware();
  hardware.h2d_bytes_per_second = kChunk / 8.0;
  hardware.d2h_bytes_per_second = 1e12;
  hardware.dram_bytes_per_second = 1e12;
  const SimulatedStep step = simulate({.count = 3}, 3 * kChunk, hardware, fp32_adam());
  // Chunk 1 is submitted when chunk 0 is there, chunk 2 when chunk 1 is.
  EXPECT_NEAR(step.step_seconds, 31.0, 1e-6);
  EXPECT_EQ(step.bound, Resource::kH2d);
  EXPECT_EQ(to_string(step.bound), "h2d");
}

TEST(SimulatorTest, SlowDramBoundsTheStep) {
  Hardware hardware = unit_hardware();
  hardware.dram_bytes_per_second = kUpdateBytes / 10.0;
  const SimulatedStep step = simulate({.count = 3}, 3 * kChunk, hardware, fp32_adam());
  EXPECT_DOUBLE_EQ(step.step_seconds, 11.0 + 30.0);
  EXPECT_EQ(step.bound, Resource::kDram);
}

// Three updates of 28 bytes an element: 16 cross the link, 12 come back. A link of 28/16 of an
// update a second in one direction takes as long as the host.
TEST(SimulatorTest, DeviceAndHostShareTheUpdates) {
  Hardware hardware = unit_hardware();
  hardware.h2d_bytes_per_second = hardware.d2h_bytes_per_second = kUpdateBytes * 16 / 28;
  hardware.dram_bytes_per_second = 10 * kUpdateBytes;
  hardware.update_bytes_per_second = kUpdateBytes;
  const auto step = [&](double fraction) {
    OptimizerCost cost = fp32_adam();
    cost.written_bytes_per_element = 12.0;
    cost.device_update_fraction = fraction;
    return simulate({.count = 3}, 3 * kChunk, hardware, cost);
  };
  const SimulatedStep none = step(0.0);
  const double updates = none.step_seconds - none.passes_seconds;
  EXPECT_DOUBLE_EQ(updates, 3.0);
  for (const double fraction : {0.25, 0.5, 0.75, 1.0}) {
    const SimulatedStep shared = step(fraction);
    EXPECT_DOUBLE_EQ(shared.passes_seconds, none.passes_seconds);
    EXPECT_NEAR(shared.step_seconds - shared.passes_seconds,
                3.0 * std::max(fraction, 1.0 - fraction), 1e-9);
    EXPECT_NEAR(busy(shared, Resource::kDram), busy(none, Resource::kDram), 1e-9)
        << "the bytes of the share cross DRAM as well";
  }
  EXPECT_THROW(step(1.5), InvalidArgument);
}

TEST(SimulatorTest, CoresMayBoundUpdatesBelowDram) {
  Hardware hardware = unit_hardware();
  hardware.update_bytes_per_second = kUpdateBytes / 4.0;
  const SimulatedStep step = simulate({.count = 3}, 3 * kChunk, hardware, fp32_adam());
  EXPECT_DOUBLE_EQ(step.step_seconds, 11.0 + 12.0);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kDram), 3.0 + 6.0 * kChunk / kUpdateBytes);
}

// Updates end at 1, 2, 3, so the chunks arrive at 2, 3, 4: forward ends at 5 instead of 4, and
// nothing follows the last gradient, which is on the host at 12.
TEST(SimulatorTest, ForwardOverlapHidesUpdatesBehindTheNextForward) {
  const SimulatedStep step =
      simulate({.count = 3}, 3 * kChunk, unit_hardware(), fp32_adam(Overlap::kForward));
  EXPECT_DOUBLE_EQ(step.step_seconds, 12.0);
}

// The norm reads 4 bytes an element, a seventh of an update, before each update may begin.
TEST(SimulatorTest, NormIsReadBeforeTheUpdates) {
  OptimizerCost optimizer = fp32_adam();
  optimizer.norm_bytes_per_element = 4.0;
  EXPECT_DOUBLE_EQ(simulate({.count = 3}, 3 * kChunk, unit_hardware(), optimizer).step_seconds,
                   14.0 + 3.0 / 7.0);
}

TEST(SimulatorTest, SharedCoresDoNotOverlapUpdatesWithCompute) {
  Hardware hardware = unit_hardware();
  hardware.update_cores = UpdateCores::kShared;
  hardware.h2d_bytes_per_second = hardware.d2h_bytes_per_second = 1e12;
  const SimulatedStep step =
      simulate({.count = 3}, 3 * kChunk, hardware, fp32_adam(Overlap::kForward));
  EXPECT_DOUBLE_EQ(step.step_seconds, 9.0 + 3.0);
}

// Nothing moves; the updates run at the device's speed, 0.1 s each, after the backward at 9.
TEST(SimulatorTest, ChunksOnTheDeviceAreUpdatedThere) {
  const std::vector<Placement> placements(3, Placement::kDevice);
  const SimulatedStep step =
      simulate({.count = 3}, kMiB, unit_hardware(), fp32_adam(), 1, placements);
  EXPECT_DOUBLE_EQ(step.step_seconds, 9.3);
  EXPECT_EQ(step.h2d_bytes + step.d2h_bytes + step.host_bytes, 0u);
  EXPECT_EQ(step.peak_device_bytes, 3 * Net::kWhole * 16);
}

TEST(SimulatorTest, NonModelBytesCountIntoThePeak) {
  const SimulatedStep step = simulate({.count = 3, .nonmodel_bytes = 1000}, kChunk + 1000,
                                      unit_hardware(), fp32_adam(), 0);
  EXPECT_EQ(step.peak_device_bytes, kChunk + 1000);
}

TEST(SimulatorTest, EmptyTraceTakesTheUpdatesOnly) {
  const ChunkLayout layout = Net::row(2).layout();
  const std::vector<Placement> placements(2);
  const Plan plan = make_plan({}, layout, placements, {.device_budget_bytes = kMiB});
  EXPECT_DOUBLE_EQ(
      simulate_step({}, {}, layout, placements, plan, unit_hardware(), fp32_adam()).step_seconds,
      2.0);
}

TEST(SimulatorTest, RefusesWhatDoesNotBelongTogether) {
  const ChunkLayout layout = Net::row(2).layout();
  const std::vector<Placement> placements(2);
  const Row row{.count = 2};
  const Plan plan = make_plan(row.trace(), layout, placements, {.device_budget_bytes = kMiB});
  const auto run = [&](const Trace& trace, const std::vector<double>& seconds,
                       const Hardware& hardware, const OptimizerCost& optimizer) {
    static_cast<void>(simulate_step(trace, seconds, layout, placements, plan, hardware, optimizer));
  };
  EXPECT_NO_THROW(run(row.trace(), row.durations(), unit_hardware(), fp32_adam()));
  EXPECT_THROW(run(row.trace(), {1.0}, unit_hardware(), fp32_adam()), InvalidArgument);
  const Row other{.count = 1};
  EXPECT_THROW(run(other.trace(), other.durations(), unit_hardware(), fp32_adam()),
               InvalidArgument);
  Hardware stopped = unit_hardware();
  stopped.dram_bytes_per_second = 0.0;
  EXPECT_THROW(run(row.trace(), row.durations(), stopped, fp32_adam()), InvalidArgument);
  OptimizerCost undefined = fp32_adam();
  undefined.moved_bytes_per_element = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(run(row.trace(), row.durations(), unit_hardware(), undefined), InvalidArgument);
  EXPECT_THROW(run(row.trace(), row.durations(), unit_hardware(), fp32_adam(Overlap::kBackward)),
               InvalidArgument);
  std::vector<double> negative = row.durations();
  negative[0] = -1.0;
  EXPECT_THROW(run(row.trace(), negative, unit_hardware(), fp32_adam()), InvalidArgument);
}

TEST(SimulatorPropertyTest, NoFasterResourceMakesAStepSlowerAndNoneIsBusyForLongerThanTheStep) {
  std::mt19937 random(20);
  for (int round = 0; round < 300; ++round) {
    const RandomCase sample = RandomCase::make(random);
    const Hardware hardware = random_hardware(random);
    OptimizerCost cost = fp32_adam(static_cast<Overlap>(random() % 2));
    cost.norm_bytes_per_element = 4.0;
    cost.written_bytes_per_element = 12.0;
    cost.device_update_fraction = static_cast<double>(random() % 5) / 4.0;
    const SimulatedStep step = sample.run(hardware, cost);
    for (const double seconds : step.busy_seconds) {
      EXPECT_LE(seconds, step.step_seconds * (1.0 + 1e-12)) << "round " << round;
    }
    for (double Hardware::*speed :
         {&Hardware::h2d_bytes_per_second, &Hardware::d2h_bytes_per_second,
          &Hardware::dram_bytes_per_second, &Hardware::device_memory_bytes_per_second,
          &Hardware::update_bytes_per_second}) {
      Hardware faster = hardware;
      faster.*speed *= 1.0 + static_cast<double>(random() % 300) / 100.0;
      EXPECT_LE(sample.run(faster, cost).step_seconds, step.step_seconds * (1.0 + 1e-12))
          << "round " << round;
    }
  }
}

TEST(SimulatorPropertyTest, RunsThePlannersDecisions) {
  std::mt19937 random(21);
  for (int round = 0; round < 300; ++round) {
    const RandomCase sample = RandomCase::make(random);
    const Prediction& planned = sample.plan.prediction();
    const SimulatedStep step = sample.run(unit_hardware(), fp32_adam());
    EXPECT_EQ(step.h2d_bytes, planned.h2d_bytes) << "round " << round;
    EXPECT_EQ(step.evictions, planned.evictions) << "round " << round;
    EXPECT_EQ(step.demand_fetches, planned.demand_fetches) << "round " << round;
  }
}

TEST(SimulatorPropertyTest, SameInputsGiveTheSameStep) {
  std::mt19937 random(22);
  for (int round = 0; round < 50; ++round) {
    const RandomCase sample = RandomCase::make(random);
    const Hardware hardware = random_hardware(random);
    const SimulatedStep one = sample.run(hardware, fp32_adam());
    const SimulatedStep two = sample.run(hardware, fp32_adam());
    EXPECT_EQ(one.step_seconds, two.step_seconds);
    EXPECT_EQ(one.busy_seconds, two.busy_seconds);
    EXPECT_EQ(one.peak_device_bytes, two.peak_device_bytes);
  }
}

}  // namespace
}  // namespace castor
