// Updates of chunks in host memory, a share of which runs on the device.

#include "store/device_updates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "optim/rule_of_type.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kChunks = 6;
constexpr std::size_t kNumel = 3001;  // of each chunk; a few begun blocks of 256

struct Format {
  const char* name;
  ScalarType type;
  StateFormat format;
};
constexpr Format kFormats[] = {
    {"Float32", ScalarType::kFloat32, StateFormat::kFp32},
    {"BFloat16", ScalarType::kBFloat16, StateFormat::kFp32},
    {"BFloat16Split", ScalarType::kBFloat16, StateFormat::kSplit},
    {"BFloat16SplitBf16", ScalarType::kBFloat16, StateFormat::kSplitBf16},
    {"BFloat16SplitInt8", ScalarType::kBFloat16, StateFormat::kSplitInt8},
    {"Float16", ScalarType::kFloat16, StateFormat::kFp32}};

/// Stores of a small model on a device with kernels.
class DeviceUpdatesTest : public ::testing::Test {
 protected:
  void make(const Format& format, std::optional<DeviceShare> share,
            std::size_t device_bytes = std::size_t{1} << 20) {
    rule_ = adam(format.format);
    store_ = std::make_unique<TestStore>(
        SmallModel::row(kChunks, kNumel, format.type).layout(kNumel * 4, rule_.get()),
        StoreOptions{.rule = rule_,
                     .device = Computes::kByItself,
                     .device_bytes = device_bytes,
                     .num_threads = 2,
                     .device_share = share});
    std::vector<std::uint64_t> streams(kChunks);
    store_->updates->set_rounding(/*seed=*/3, streams);
  }
  /// Takes a step of every chunk with gradients that the step's number chooses.
  void step(int number) const {
    std::minstd_rand random(static_cast<unsigned>(number));
    std::vector<std::vector<ParamUpdate>> updates;
    for (std::size_t i = 0; i < kChunks; ++i) {
      const ScalarType type = store_->layout.param(param_id(i)).type;
      Bytes gradient(kNumel * size_of(type));
      for (std::size_t at = 0; at < gradient.size(); at += size_of(type)) {
        // Bits of a normal number in each of the types.
        const auto high = static_cast<std::uint16_t>(0x3000 | (random() & 0x87ff));
        std::memcpy(gradient.data() + at + size_of(type) - 2, &high, 2);
      }
      store_->write_gradient(param_id(i), gradient);
      updates.push_back(
          {store_->updates->update_of(param_id(i), adam_options(0.01, 0.1), number, 0.5)});
    }
    std::size_t num_begun = 0;
    store_->updates->run_all(updates, num_begun);
    EXPECT_EQ(num_begun, kChunks);
  }
  /// Returns the arrays of the first chunk, for a first step.
  [[nodiscard]] UpdateSegment first_chunk() const {
    const ChunkMemory memory = store_->states->in_place(chunk_id(0));
    const ParamUpdate update = store_->updates->update_of(param_id(0), adam_options(), 1, 1.0);
    const auto at = [&](PayloadKind kind) {
      return store_->states->element(memory, param_id(0), kind);
    };
    return {.param = at(PayloadKind::kParam),
            .grad = at(PayloadKind::kGrad),
            .master = reinterpret_cast<float*>(at(kMasterPayload)),
            .states = {at(rule_payload(0)), at(rule_payload(1))},
            .type = store_->layout.param(param_id(0)).type,
            .numel = kNumel,
            .coefficients = update.coefficients,
            .rounding = update.rounding};
  }
  /// Returns the bytes of all weights and states.
  [[nodiscard]] std::vector<Bytes> contents() const {
    std::vector<Bytes> contents;
    for (std::size_t i = 0; i < kChunks; ++i) {
      contents.push_back(store_->read_weights(param_id(i)));
      for (const PayloadKind kind : store_->states->kinds(chunk_id(i))) {
        contents.push_back(store_->read_state(param_id(i), kind));
      }
    }
    return contents;
  }

  std::shared_ptr<const UpdateRule> rule_;
  std::unique_ptr<TestStore> store_;
};

/// A host that takes longer than any copy of a small chunk.
class SlowExecutor final : public Executor {
 public:
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    inline_.parallel_for(count, body);
  }
  [[nodiscard]] std::size_t num_threads() const noexcept override { return 1; }

 private:
  InlineExecutor inline_;
};

class DeviceUpdatesBitsTest : public DeviceUpdatesTest,
                              public ::testing::WithParamInterface<std::tuple<Format, double>> {};

TEST_P(DeviceUpdatesBitsTest, EveryShareHasTheBitsOfTheHost) {
  const auto& [format, fraction] = GetParam();
  make(format, std::nullopt);
  for (int number = 1; number <= 3; ++number) {
    step(number);
  }
  const std::vector<Bytes> expected = contents();
  make(format, DeviceShare{.fraction = fraction, .adapts = false});
  for (int number = 1; number <= 3; ++number) {
    step(number);
  }
  EXPECT_EQ(contents(), expected);
  const auto on_device = static_cast<double>(store_->device_updates->updated_elements());
  EXPECT_NEAR(on_device, fraction * 3 * kChunks * kNumel, 3 * 256);
  const std::vector<StreamId> streams = store_->backend->updates();
  EXPECT_EQ(streams, std::vector<StreamId>(streams.size(), FakeLane::kStream));
  if (fraction == 1.0) {
    EXPECT_GT(streams.size(), 3 * DeviceUpdates::kSlots) << "the ring went round in each step";
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceUpdatesBitsTest,
                         ::testing::Combine(::testing::ValuesIn(kFormats),
                                            ::testing::Values(0.0, 0.3, 0.6, 1.0)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "Of" +
                                  std::to_string(static_cast<int>(std::get<1>(info.param) * 100)) +
                                  "Percent";
                         });

TEST_F(DeviceUpdatesTest, TheDevicesBudgetPaysForTheRing) {
  const Format& format = kFormats[2];
  make(format, std::nullopt);
  const std::size_t before = store_->device_tier->ledger().used();
  make(format, DeviceShare{.fraction = 0.5, .adapts = false});
  const std::size_t ring = DeviceUpdates::ring_bytes(store_->layout, *rule_);
  EXPECT_EQ(store_->device_tier->ledger().used(), before + ring);
  EXPECT_EQ(store_->device_updates->bytes(), ring);
  EXPECT_GT(ring / DeviceUpdates::kSlots, kNumel * (2 + 2 + 2 + 8)) << "a chunk fits into a slot";
  expect_out_of_memory([&] { make(format, DeviceShare{.fraction = 0.5}, ring - 1); },
                       TierKind::kDevice, ring, ring - 1, ring - 1);
}

TEST_F(DeviceUpdatesTest, LargeChunksCrossALargeSlotInPieces) {
  const ChunkLayout layout = SmallModel::row(1, 10'000'000).layout(40'000'000);
  EXPECT_EQ(DeviceUpdates::ring_bytes(layout, *adam()),
            DeviceUpdates::kSlots * DeviceUpdates::kSlotBytes);
}

TEST_F(DeviceUpdatesTest, ADeviceWithoutAKernelIsRefused) {
  expect_thrown<UsageError>(
      [] {
        const TestStore store(SmallModel::row(1, 16).layout(64),
                              {.device_share = DeviceShare{.fraction = 0.5}});
      },
      "this device is the host's own");
}

TEST_F(DeviceUpdatesTest, AShareThatAdaptsGrowsWhileTheDeviceIsFirst) {
  make(kFormats[0], std::nullopt);
  DeviceUpdates updates(store_->layout, *rule_, store_->device, *store_->device_tier,
                        {.fraction = 0.02, .adapts = true});
  const UpdateSegment segment = first_chunk();
  SlowExecutor executor;
  updates.update(*rule_, executor, std::span(&segment, 1));
  EXPECT_GE(updates.fraction(), 0.1);
}

TEST_F(DeviceUpdatesTest, AShareThatAdaptsFallsWhereTheLinkIsSlow) {
  make(kFormats[0], std::nullopt);
  store_->backend->set_lane({.bytes_per_second = 100'000, .copy = {}});
  const ChunkLayout& layout = store_->layout;
  DeviceUpdates updates(layout, *rule_, store_->device, *store_->device_tier,
                        {.fraction = 0.5, .adapts = true});
  const UpdateSegment segment = first_chunk();
  updates.update(*rule_, store_->executor, std::span(&segment, 1));
  EXPECT_LT(updates.fraction(), 0.3);
}

TEST_F(DeviceUpdatesTest, AFailedCopyEndsTheUpdateWithNothingUnderWay) {
  make(kFormats[1], std::nullopt);
  std::atomic<int> num_copies = 0;
  std::atomic<int> under_way = 0;
  std::atomic<int> fails = 0;
  store_->backend->set_lane({.bytes_per_second = 0, .copy = [&](const CopyRequest& request) {
                               ++under_way;
                               if (++num_copies == fails) {
                                 --under_way;
                                 throw InjectedFailure("copy");
                               }
                               std::memcpy(request.target.data(), request.source.data(),
                                           request.source.size());
                               --under_way;
                             }});
  DeviceUpdates updates(store_->layout, *rule_, store_->device, *store_->device_tier,
                        {.fraction = 1.0, .adapts = false});
  const UpdateSegment segment = first_chunk();
  const auto run = [&] { updates.update(*rule_, store_->executor, std::span(&segment, 1)); };
  for (fails = 1; fails <= 5 + 4; ++fails) {  // five arrays go, four come back
    num_copies = 0;
    EXPECT_THROW(run(), InjectedFailure) << fails;
    EXPECT_EQ(under_way, 0);
  }
  num_copies = 0;
  run();
  EXPECT_EQ(num_copies, 9);
}

}  // namespace
}  // namespace castor::testing
