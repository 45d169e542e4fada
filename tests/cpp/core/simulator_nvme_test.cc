#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <vector>

#include "core/error.h"
#include "core/simulated_steps.h"
#include "core/simulator.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

/// Reads a chunk's parameters in a second.
Hardware with_nvme() {
  Hardware hardware = unit_hardware();
  hardware.nvme_bytes_per_second = kChunk;
  return hardware;
}

/// Parameters and gradients of every chunk, no states.
StoredPayloads all_weights(std::size_t count, std::size_t max_leases = 1) {
  return {.weights = std::vector<bool>(count, true), .max_leases = max_leases};
}

SimulatedStep simulate_stored(const Row& row, const OptimizerCost& optimizer,
                              std::size_t max_prefetch, const StoredPayloads& stored) {
  return simulate(row, row.count * kChunk, with_nvme(), optimizer, max_prefetch, {}, stored);
}

// State of 8 bytes an element, read and written at one chunk's state in 5 s: the last gradient is
// on the host at 11, then two chunks stream for 10 s each, the third is in memory.
TEST(SimulatorNvmeTest, StateIsStreamedByItsUpdate) {
  Hardware hardware = unit_hardware();
  const double state = Net::kWhole * 8.0;
  hardware.nvme_bytes_per_second = state / 5.0;
  const SimulatedStep step = simulate({.count = 3}, 3 * kChunk, hardware, fp32_adam(), 1, {},
                                      {.states = {true, false, true}});
  EXPECT_DOUBLE_EQ(step.step_seconds, 11.0 + 20.0);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kNvme), 20.0);
  EXPECT_EQ(step.bound, Resource::kNvme);
  EXPECT_EQ(to_string(step.bound), "nvme");
  EXPECT_EQ(step.nvme_bytes, 2 * Net::kWhole * 8);
  EXPECT_EQ(step.host_bytes, 3 * Net::kWhole * 16 - step.nvme_bytes);
}

TEST(SimulatorNvmeTest, WeightsAndStatesCountWhereTheyLie) {
  const StoredPayloads stored{
      .states = {true, true, false}, .weights = {true, false, false}, .max_leases = 1};
  const SimulatedStep step = simulate_stored({.count = 3}, fp32_adam(), 1, stored);
  EXPECT_EQ(step.nvme_bytes, Net::kWhole * 16 + Net::kWhole * 8);
  EXPECT_EQ(step.host_bytes, 3 * Net::kWhole * 16 - step.nvme_bytes);
}

// Chunk 0 is read until 1 and copied until 2; chunk 1 until 3 and 4, chunk 2, read ahead, until 4
// and 5: forward ends at 6. Each backward of 2 s waits for its gradient's copy of 1 s: 15. The
// updates read parameters and gradients and write parameters: 3 s each, behind the last gradient's
// write at 16.
TEST(SimulatorNvmeTest, WeightsAreReadForTheDeviceAndStreamedByTheirUpdate) {
  const SimulatedStep step = simulate_stored({.count = 3}, fp32_adam(), 1, all_weights(3));
  EXPECT_DOUBLE_EQ(step.step_seconds, 16.0 + 9.0);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kNvme), 3.0 + 3.0 + 9.0);
  EXPECT_EQ(step.demand_fetches, 1u);
}

// Copies start at the access; reads do not wait for it: 2, 4 and 6 instead of 2, 5 and 8.
TEST(SimulatorNvmeTest, WeightsAreReadAheadOfAFetchOnDemand) {
  const SimulatedStep step = simulate_stored({.count = 3}, fp32_adam(), 0, all_weights(3));
  EXPECT_DOUBLE_EQ(step.step_seconds, 17.0 + 9.0);
  EXPECT_EQ(step.demand_fetches, 3u);
}

// The norm of gradients of a second each, behind the last gradient's write at 16.
TEST(SimulatorNvmeTest, NormReadsTheGradientsBeforeTheUpdates) {
  OptimizerCost optimizer = fp32_adam();
  optimizer.norm_bytes_per_element = 4.0;
  const SimulatedStep step = simulate_stored({.count = 3}, optimizer, 1, all_weights(3));
  EXPECT_DOUBLE_EQ(step.step_seconds, 16.0 + 3.0 + 1.0 / 7.0 + 9.0);
}

// Each chunk's update of 3 s is followed by the read of 1 s: in memory at 4, 8 and 12, on the
// device at 5, 9 and 13, forward ends at 14. Backward ends at 23, the last gradient is written
// at 24.
TEST(SimulatorNvmeTest, UpdatesBesideForwardShareNvmeWithItsReads) {
  const SimulatedStep step =
      simulate_stored({.count = 3}, fp32_adam(Overlap::kForward), 1, all_weights(3));
  EXPECT_DOUBLE_EQ(step.step_seconds, 24.0);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kNvme), 9.0 + 3.0 + 3.0);
}

// One slot: backward fetches two chunks again, which are read again.
TEST(SimulatorNvmeTest, WhatLeftTheDeviceIsReadAgain) {
  const SimulatedStep step = simulate({.count = 3}, kChunk, with_nvme(),
                                      fp32_adam(Overlap::kForward), 0, {}, all_weights(3));
  EXPECT_EQ(step.demand_fetches, 5u);
  EXPECT_DOUBLE_EQ(busy(step, Resource::kNvme), 9.0 + 3.0 + 5.0);
}

// The plan fetches chunks 1 to 3 at once; memory has room for one.
TEST(SimulatorNvmeTest, NoMoreIsFetchedAheadThanTheWindowHolds) {
  EXPECT_EQ(simulate_stored({.count = 4}, fp32_adam(), 4, all_weights(4, 8)).demand_fetches, 1u);
  EXPECT_EQ(simulate_stored({.count = 4}, fp32_adam(), 4, all_weights(4, 1)).demand_fetches, 3u);
}

// Whoever copies would have to wait for the read.
TEST(SimulatorNvmeTest, SynchronousCopiesAreNotMadeAhead) {
  Hardware hardware = with_nvme();
  hardware.parameter_copies = CopyMode::kSynchronous;
  const SimulatedStep step =
      simulate({.count = 3}, 3 * kChunk, hardware, fp32_adam(), 1, {}, all_weights(3));
  EXPECT_EQ(step.demand_fetches, 3u);
}

TEST(SimulatorNvmeTest, WhatCannotBeStoredIsRefused) {
  const auto run = [](const Hardware& hardware, const StoredPayloads& stored) {
    static_cast<void>(simulate({.count = 2}, 2 * kChunk, hardware, fp32_adam(), 1, {}, stored));
  };
  EXPECT_NO_THROW(run(with_nvme(), all_weights(2)));
  EXPECT_THROW(run(unit_hardware(), {.states = {true, false}}), InvalidArgument);
  EXPECT_THROW(run(unit_hardware(), all_weights(2)), InvalidArgument);
  EXPECT_THROW(run(with_nvme(), {.states = {false}}), InvalidArgument);
  EXPECT_THROW(run(with_nvme(), all_weights(3)), InvalidArgument);
  EXPECT_THROW(run(with_nvme(), all_weights(2, 0)), InvalidArgument);
}

StoredPayloads random_stored(const RandomCase& sample, std::mt19937& random) {
  StoredPayloads stored{.max_leases = 1 + random() % 4};
  for (std::size_t i = 0; i < sample.layout.chunks().size(); ++i) {
    stored.states.push_back(random() % 2 == 0);
    stored.weights.push_back(random() % 2 == 0);
  }
  return stored;
}

TEST(SimulatorNvmePropertyTest, NoFasterResourceMakesAStepSlowerAndNoneIsBusyForLonger) {
  std::mt19937 random(23);
  for (int round = 0; round < 300; ++round) {
    const RandomCase sample = RandomCase::make(random);
    const StoredPayloads stored = random_stored(sample, random);
    Hardware hardware = random_hardware(random);
    hardware.nvme_bytes_per_second = 100.0 + static_cast<double>(random() % 5000);
    OptimizerCost cost = fp32_adam(static_cast<Overlap>(random() % 2));
    cost.norm_bytes_per_element = random() % 2 == 0 ? 4.0 : 0.0;
    const SimulatedStep step = sample.run(hardware, cost, stored);
    for (const double seconds : step.busy_seconds) {
      EXPECT_LE(seconds, step.step_seconds * (1.0 + 1e-12)) << "round " << round;
    }
    for (double Hardware::*speed :
         {&Hardware::h2d_bytes_per_second, &Hardware::d2h_bytes_per_second,
          &Hardware::dram_bytes_per_second, &Hardware::device_memory_bytes_per_second,
          &Hardware::nvme_bytes_per_second}) {
      Hardware faster = hardware;
      faster.*speed *= 1.0 + static_cast<double>(random() % 300) / 100.0;
      EXPECT_LE(sample.run(faster, cost, stored).step_seconds, step.step_seconds * (1.0 + 1e-12))
          << "round " << round;
    }
  }
}

TEST(SimulatorNvmePropertyTest, BytesLieOnOneTierEach) {
  std::mt19937 random(24);
  for (int round = 0; round < 300; ++round) {
    const RandomCase sample = RandomCase::make(random);
    const StoredPayloads stored = random_stored(sample, random);
    Hardware hardware = random_hardware(random);
    hardware.parameter_copies = CopyMode::kOverlapped;
    hardware.nvme_bytes_per_second = 1000.0;
    const SimulatedStep in_memory = sample.run(hardware, fp32_adam());
    const SimulatedStep step = sample.run(hardware, fp32_adam(), stored);
    EXPECT_EQ(step.host_bytes + step.nvme_bytes, in_memory.host_bytes) << "round " << round;
    EXPECT_EQ(step.nvme_bytes > 0, busy(step, Resource::kNvme) > 0.0) << "round " << round;
    EXPECT_EQ(in_memory.nvme_bytes, 0u);
  }
}

TEST(SimulatorNvmePropertyTest, SameInputsGiveTheSameStep) {
  std::mt19937 random(25);
  for (int round = 0; round < 50; ++round) {
    const RandomCase sample = RandomCase::make(random);
    const StoredPayloads stored = random_stored(sample, random);
    Hardware hardware = random_hardware(random);
    hardware.nvme_bytes_per_second = 1000.0;
    const SimulatedStep one = sample.run(hardware, fp32_adam(), stored);
    const SimulatedStep two = sample.run(hardware, fp32_adam(), stored);
    EXPECT_EQ(one.step_seconds, two.step_seconds);
    EXPECT_EQ(one.busy_seconds, two.busy_seconds);
  }
}

}  // namespace
}  // namespace castor
