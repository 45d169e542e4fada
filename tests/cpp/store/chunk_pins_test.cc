#include "store/chunk_pins.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/machine.h"
#include "store/fake_device.h"

namespace castor::testing {
namespace {

/// Two chunks, of which the first has its gradients on the device too.
class ChunkPinsTest : public ::testing::Test {
 protected:
  ChunkPinsTest() {
    manager_.add_payload(chunk_id(0), PayloadKind::kGrad, Net::kChunk);
    EXPECT_TRUE(manager_.try_promote(chunk_id(0)));
  }
  static SessionDevice device(Computes computes) {
    return SessionDevice(std::make_shared<FakeDevice>(computes));
  }

  SimulatedMachine machine_{Net::row(2).layout(), 4 * Net::kChunk};
  ChunkManager& manager_ = *machine_.rig.manager;
  const std::vector<ChunkId> both_ = {chunk_id(0), chunk_id(1)};
};

TEST_F(ChunkPinsTest, ChunksWhoseGradientsAreOnTheDeviceArePinned) {
  const SessionDevice device = this->device(Computes::kByItself);
  {
    const ChunkPins pins(*machine_.runtime, device, both_);
    EXPECT_EQ(manager_.pins(chunk_id(0)), 1U);
    EXPECT_EQ(manager_.pins(chunk_id(1)), 0U);
    EXPECT_THROW(manager_.demote(chunk_id(0)), UsageError);
  }
  EXPECT_EQ(manager_.pins(chunk_id(0)), 0U);
  manager_.demote(chunk_id(0));
}

TEST_F(ChunkPinsTest, WhereTheHostComputesNothingIsPinned) {
  const SessionDevice device = this->device(Computes::kOnHost);
  const ChunkPins pins(*machine_.runtime, device, both_);
  EXPECT_EQ(manager_.num_operator_pins(), 0U);
}

TEST_F(ChunkPinsTest, NoChunksNeedNoPin) {
  const SessionDevice device = this->device(Computes::kByItself);
  const ChunkPins pins(*machine_.runtime, device, {});
  EXPECT_EQ(manager_.num_operator_pins(), 0U);
}

TEST_F(ChunkPinsTest, AddSaysWhetherThereWasSomethingToPin) {
  ChunkPins pins(*machine_.runtime);
  EXPECT_TRUE(pins.add(chunk_id(0), {}, PayloadKind::kParam));
  EXPECT_TRUE(pins.add(chunk_id(0), {}, PayloadKind::kGrad));
  EXPECT_FALSE(pins.add(chunk_id(1), {}, PayloadKind::kParam));
  EXPECT_EQ(manager_.pins(chunk_id(0)), 2U);
}

TEST_F(ChunkPinsTest, MovedPinsEndOnce) {
  ChunkPins pins(*machine_.runtime);
  EXPECT_TRUE(pins.add(chunk_id(0), {}, PayloadKind::kGrad));
  {
    const ChunkPins moved(std::move(pins));
    EXPECT_EQ(manager_.pins(chunk_id(0)), 1U);
  }
  EXPECT_EQ(manager_.pins(chunk_id(0)), 0U);
}

}  // namespace
}  // namespace castor::testing
