// Gradients of small chunks that gather in memory of a device, which is the heap's.

#include "store/device_gradients.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "core/fakes.h"
#include "parallel/immediate_copy_engine.h"
#include "store/small_model.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kParam = 64;
constexpr std::size_t kChunk = 2 * kParam;  // two parameters
constexpr std::size_t kChunks = 5;
constexpr std::byte kUnwritten{0x11};

ChunkId chunk_id(std::size_t i) { return ChunkId{static_cast<std::uint32_t>(i)}; }
ParamId param_id(std::size_t i) { return ParamId{static_cast<std::uint32_t>(i)}; }

struct Gathered {
  explicit Gathered(std::vector<bool> gathers = std::vector<bool>(kChunks, true),
                    std::size_t budget = 3 * kChunk)
      : device(TierKind::kDevice, budget,
               std::make_unique<HeapArena>(std::make_shared<LiveBlocks>())),
        gradients(layout, gathers, device, std::make_shared<ImmediateCopyEngine>()) {}

  /// Writes a parameter's gradient; returns whether it was the buffer's first.
  bool add(std::size_t param, int value) {
    bool was_first = false;
    const bool added = gradients.add(param_id(param), [&](std::span<std::byte> buffer, bool first) {
      was_first = first;
      std::memset(buffer.data() + param % 2 * kParam, value, kParam);
    });
    EXPECT_TRUE(added);
    return was_first;
  }

  ChunkLayout layout = SmallModel::row(2 * kChunks, kParam / sizeof(float)).layout(kChunk);
  MemoryTier device;
  DeviceGradients gradients;
};

Bytes of(int first, int second) {
  Bytes bytes(kParam, static_cast<std::byte>(first));
  bytes.resize(kChunk, static_cast<std::byte>(second));
  return bytes;
}

TEST(DeviceGradientsTest, AsManyChunksGatherAsThereAreBuffers) {
  Gathered own;
  EXPECT_EQ(own.device.ledger().used(), 3 * kChunk);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(own.gradients.begin(chunk_id(i)));
  }
  EXPECT_FALSE(own.gradients.begin(chunk_id(3)));
  EXPECT_FALSE(own.gradients.gathering(chunk_id(3)));
  own.gradients.release(chunk_id(1), 0);
  EXPECT_FALSE(own.gradients.gathering(chunk_id(1)));
  EXPECT_TRUE(own.gradients.begin(chunk_id(3)));
}

TEST(DeviceGradientsTest, BuffersAreForChunksThatGatherAlone) {
  std::vector<bool> gathers(kChunks, false);
  EXPECT_EQ(Gathered(gathers).device.ledger().used(), 0);
  gathers[4] = true;
  EXPECT_EQ(Gathered(gathers).device.ledger().used(), kChunk);
}

TEST(DeviceGradientsTest, ADeviceWithoutRoomIsOutOfMemory) {
  EXPECT_THROW(Gathered(std::vector<bool>(kChunks, true), 3 * kChunk - 1), OutOfMemory);
}

TEST(DeviceGradientsTest, AChunkIsCompleteWithAGradientOfEachParameter) {
  Gathered own;
  EXPECT_FALSE(own.gradients.add(param_id(2), [](auto, bool) { FAIL(); }));
  ASSERT_TRUE(own.gradients.begin(chunk_id(1)));
  EXPECT_TRUE(own.add(3, 7));
  EXPECT_FALSE(own.add(3, 8));  // again, as where a pass before has failed
  EXPECT_FALSE(own.gradients.complete(chunk_id(1)));
  EXPECT_FALSE(own.add(2, 9));
  EXPECT_TRUE(own.gradients.complete(chunk_id(1)));
  const std::span<const std::byte> values = own.gradients.values(chunk_id(1));
  EXPECT_EQ(Bytes(values.begin(), values.end()), of(9, 8));
  own.gradients.release(chunk_id(1), kChunk / 4);
  EXPECT_TRUE(own.gradients.values(chunk_id(1)).empty());
  EXPECT_EQ(own.gradients.bytes_moved(), kChunk / 4);
}

TEST(DeviceGradientsTest, WhatHasComeGoesToTheHostAndTheRestIsLeft) {
  Gathered own;
  ASSERT_TRUE(own.gradients.begin(chunk_id(0)));
  own.add(1, 5);
  Bytes host(kChunk, kUnwritten);
  own.gradients.move_to_host(chunk_id(0), [&] { return host.data(); });
  EXPECT_EQ(host, of(0x11, 5));
  EXPECT_EQ(own.gradients.bytes_moved(), kParam);
  EXPECT_FALSE(own.gradients.gathering(chunk_id(0)));
  own.gradients.move_to_host(chunk_id(0), []() -> std::byte* {
    ADD_FAILURE() << "it does not gather any more";
    return nullptr;
  });
}

TEST(DeviceGradientsTest, AHostWithoutRoomLeavesThemOnTheDevice) {
  Gathered own;
  ASSERT_TRUE(own.gradients.begin(chunk_id(0)));
  own.add(0, 3);
  own.add(1, 4);
  const auto no_room = []() -> std::byte* { throw InjectedFailure("no room"); };
  EXPECT_THROW(own.gradients.move_to_host(chunk_id(0), no_room), InjectedFailure);
  Bytes host(kChunk, kUnwritten);
  own.gradients.move_to_host(chunk_id(0), [&] { return host.data(); });
  EXPECT_EQ(host, of(3, 4));
}

}  // namespace
}  // namespace castor::testing
