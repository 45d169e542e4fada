#include <gtest/gtest.h>

#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/machine.h"

// What an operator was given stays where it is until its kernel has been given to a stream.
namespace castor {
namespace {

using testing::chunk_id;
using testing::enter;
using testing::exit;
using testing::Net;
using testing::SimulatedMachine;

constexpr std::size_t kChunk = Net::kChunk;
const ChunkId kA = chunk_id(0);
const ChunkId kB = chunk_id(1);

std::vector<Pin> held(SimulatedMachine& machine, ChunkId chunk) {
  std::vector<Pin> pins;
  pins.push_back(machine.runtime->pin_for_operator(chunk).value());
  return pins;
}

TEST(OperatorPinTest, AnOperatorsAllocationDoesNotEvictWhatItWasGiven) {
  SimulatedMachine machine(Net::row(2).layout(), 2 * kChunk);
  machine.run({enter(0), exit(0), enter(1), exit(1)}, PassMode::kInference);
  std::vector<Pin> pins = held(machine, kA);
  machine.nonmodel->allocate(kChunk);  // the other one leaves
  EXPECT_FALSE(machine.rig.manager->resident(kB));
  EXPECT_THROW(machine.nonmodel->allocate(kChunk), OutOfMemory);
  EXPECT_FALSE(machine.runtime->evict_refused(kChunk));
  EXPECT_TRUE(machine.rig.manager->bound(kA));
  machine.runtime->unpin(pins);
  machine.nonmodel->allocate(kChunk);
  EXPECT_FALSE(machine.rig.manager->resident(kA));
}

TEST(OperatorPinTest, APromotedChunkIsNotDemotedUnderAnOperatorsPin) {
  SimulatedMachine machine(Net::row(2).layout(), 4 * kChunk);
  ChunkManager& manager = *machine.rig.manager;
  manager.add_payload(kA, PayloadKind::kGrad, kChunk);
  ASSERT_TRUE(manager.try_promote(kA));
  std::vector<Pin> pins;
  EXPECT_FALSE(machine.runtime->pin_for_operator(kB, {}, PayloadKind::kGrad))
      << "its gradients are on the host";
  pins.push_back(machine.runtime->pin_for_operator(kA, {}, PayloadKind::kGrad).value());
  EXPECT_FALSE(manager.demote_one());
  EXPECT_THROW(manager.demote(kA), UsageError);
  EXPECT_THROW(machine.nonmodel->allocate(4 * kChunk), OutOfMemory);
  EXPECT_TRUE(manager.promoted(kA));
  machine.runtime->unpin(pins);
  machine.nonmodel->allocate(4 * kChunk);
  EXPECT_FALSE(manager.promoted(kA));
}

TEST(OperatorPinTest, AChunkIsPinnedAsOftenAsOperatorsUseIt) {
  SimulatedMachine machine(Net::row(1).layout(), kChunk);
  machine.run({enter(0), exit(0)}, PassMode::kInference);
  std::vector<Pin> first = held(machine, kA);
  std::vector<Pin> second = held(machine, kA);
  EXPECT_EQ(machine.rig.manager->num_operator_pins(), 2u);
  machine.runtime->unpin(first);
  EXPECT_THROW(machine.nonmodel->allocate(kChunk), OutOfMemory);
  machine.runtime->unpin(second);
  EXPECT_EQ(machine.rig.manager->num_operator_pins(), 0u);
  machine.nonmodel->allocate(kChunk);
}

TEST(OperatorPinTest, WhatIsNotOnTheDeviceIsNotPinned) {
  SimulatedMachine machine(Net::row(1).layout(), kChunk);
  EXPECT_FALSE(machine.runtime->pin_for_operator(kA));
  EXPECT_THROW(static_cast<void>(machine.rig.manager->pin_for_operator(kA, {})), UsageError);
}

TEST(OperatorPinTest, TheStepWaitsForOperatorsOfOtherThreads) {
  SimulatedMachine machine(Net::row(1).layout(), kChunk);
  machine.run({enter(0), exit(0)}, PassMode::kInference);
  std::vector<Pin> pins = held(machine, kA);
  std::promise<void> begins;
  std::exception_ptr failure;
  std::jthread step([&] {
    begins.set_value();
    try {
      machine.runtime->begin_update();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  begins.get_future().wait();
  EXPECT_TRUE(machine.rig.manager->bound(kA));
  machine.runtime->unpin(pins);
  step.join();
  EXPECT_FALSE(failure) << "it did not wait";
  EXPECT_FALSE(machine.rig.manager->resident(kA));
}

}  // namespace
}  // namespace castor
