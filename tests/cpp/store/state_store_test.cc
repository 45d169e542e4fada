// Optimizer states in host memory, on NVMe and on a device, of small models. On NVMe each payload
// takes whole blocks of 4 KiB.

#include "store/state_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "core/random_bytes.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;
using Kinds = std::vector<PayloadKind>;

constexpr PayloadKind kExpAvg = rule_payload(0);
constexpr PayloadKind kExpAvgSq = rule_payload(1);
constexpr PayloadKind kScales = rule_payload(2);

std::byte* at(const ChunkMemory& memory, PayloadKind kind) {
  return memory[static_cast<std::size_t>(kind)];
}

/// A rule that updates whole matrices.
class MatrixRule final : public UpdateRule {
 public:
  MatrixRule() : UpdateRule(StateFormat::kFp32) {}
  [[nodiscard]] std::string_view name() const noexcept override { return "matrix"; }
  [[nodiscard]] std::span<const StateSpec> states() const noexcept override { return {}; }
  [[nodiscard]] std::span<const std::string_view> option_names() const noexcept override {
    return {};
  }
  [[nodiscard]] std::size_t granule() const noexcept override { return kWholeParameter; }
  [[nodiscard]] RuleCoefficients coefficients(const RuleOptions& /*options*/, std::int64_t /*step*/,
                                              double /*grad_scale*/) const override {
    return RuleCoefficients(0);
  }
  void update(Executor& /*executor*/, std::span<const UpdateSegment> /*segments*/) const override {}
};

TEST(ParamAlignmentTest, ElementsThatAreUpdatedTogetherBeginWithAParameter) {
  const auto int8 = adam(StateFormat::kSplitInt8);
  EXPECT_EQ(param_alignment(nullptr, ScalarType::kFloat32), kParamAlignment);
  EXPECT_EQ(param_alignment(adam().get(), ScalarType::kFloat32), kParamAlignment);
  EXPECT_EQ(param_alignment(int8.get(), ScalarType::kBFloat16), 2 * kMomentBlock);
  EXPECT_EQ(param_alignment(int8.get(), ScalarType::kFloat32), kParamAlignment);
  const MatrixRule matrix;
  EXPECT_EQ(param_alignment(&matrix, ScalarType::kFloat32), kParamAlignment);
}

struct KindsCase {
  const char* name;
  ScalarType type;
  StateFormat format;
  Kinds kinds;
  std::vector<std::size_t> bytes;  // of 512 elements
};
void PrintTo(const KindsCase& one, std::ostream* stream) { *stream << one.name; }

class StateKindsTest : public ::testing::TestWithParam<KindsCase> {};

TEST_P(StateKindsTest, AChunkHasThePayloadsOfItsFormat) {
  const KindsCase& expected = GetParam();
  const auto rule = adam(expected.format);
  const TestStore store(SmallModel::row(1, 512, expected.type).layout(2048, rule.get()),
                        {.rule = rule});
  const ChunkId chunk = chunk_id(0);
  EXPECT_EQ(store.states->kinds(chunk), expected.kinds);
  const auto payloads = state_payloads(store.layout.chunk(chunk), rule.get());
  ASSERT_EQ(payloads.size(), expected.kinds.size());
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    EXPECT_EQ(payloads[i].bytes, expected.bytes[i]);
    EXPECT_EQ(store.states->payload(chunk, expected.kinds[i]).bytes(), expected.bytes[i]);
    EXPECT_EQ(store.states->bytes(param_id(0), expected.kinds[i], 512), expected.bytes[i]);
    EXPECT_TRUE(store.states->has(param_id(0), expected.kinds[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, StateKindsTest,
                         ::testing::Values(KindsCase{"Float32",
                                                     ScalarType::kFloat32,
                                                     StateFormat::kFp32,
                                                     {kExpAvg, kExpAvgSq},
                                                     {2048, 2048}},
                                           KindsCase{"Float16",
                                                     ScalarType::kFloat16,
                                                     StateFormat::kFp32,
                                                     {kMasterPayload, kExpAvg, kExpAvgSq},
                                                     {2048, 2048, 2048}},
                                           KindsCase{"BFloat16",
                                                     ScalarType::kBFloat16,
                                                     StateFormat::kFp32,
                                                     {kMasterPayload, kExpAvg, kExpAvgSq},
                                                     {2048, 2048, 2048}},
                                           KindsCase{"Split",
                                                     ScalarType::kBFloat16,
                                                     StateFormat::kSplit,
                                                     {kRemainderPayload, kExpAvg, kExpAvgSq},
                                                     {1024, 2048, 2048}},
                                           KindsCase{"SplitBf16",
                                                     ScalarType::kBFloat16,
                                                     StateFormat::kSplitBf16,
                                                     {kRemainderPayload, kExpAvg, kExpAvgSq},
                                                     {1024, 1024, 1024}},
                                           KindsCase{
                                               "SplitInt8",
                                               ScalarType::kBFloat16,
                                               StateFormat::kSplitInt8,
                                               {kRemainderPayload, kExpAvg, kExpAvgSq, kScales},
                                               {1024, 512, 512, 16}},
                                           KindsCase{"Float32BesideSplitInt8",
                                                     ScalarType::kFloat32,
                                                     StateFormat::kSplitInt8,
                                                     {kExpAvg, kExpAvgSq},
                                                     {2048, 2048}}),
                         [](const auto& one) { return one.param.name; });

TEST(StateStoreTest, FrozenChunksAndThoseOfOtherOptimizersHaveNoStates) {
  SmallModel model;
  model.add(16).add(16, ScalarType::kFloat32, /*trainable=*/false);
  model.add(16, ScalarType::kFloat32, true, /*has_state=*/false);
  const TestStore store(model.layout(64), {});
  EXPECT_EQ(store.states->kinds(chunk_id(0)).size(), 2U);
  EXPECT_TRUE(store.states->kinds(chunk_id(1)).empty());
  EXPECT_TRUE(store.states->kinds(chunk_id(2)).empty());
  EXPECT_FALSE(store.states->has(param_id(1), kExpAvg));
}

TEST(StateStoreTest, WithoutARuleThereAreNoStates) {
  const TestStore store(SmallModel::row(1, 16).layout(64), {.rule = nullptr});
  EXPECT_TRUE(store.states->kinds(chunk_id(0)).empty());
  EXPECT_EQ(store.host->ledger().used(), 2 * 64U);  // parameters and gradients
}

TEST(StateStoreTest, KindsHaveTheNamesOfCheckpoints) {
  const auto rule = adam(StateFormat::kSplitInt8);
  const TestStore store(SmallModel::row(1, 16, ScalarType::kBFloat16).layout(512, rule.get()),
                        {.rule = rule});
  EXPECT_EQ(store.states->name_of(PayloadKind::kParam), "param");
  EXPECT_EQ(store.states->name_of(PayloadKind::kGrad), "grad");
  EXPECT_EQ(store.states->name_of(kMasterPayload), "master");
  EXPECT_EQ(store.states->name_of(kRemainderPayload), "remainder");
  EXPECT_EQ(store.states->name_of(kExpAvgSq), "exp_avg_sq");
  EXPECT_EQ(store.states->name_of(kScales), "scales");
}

TEST(StateStoreTest, ASplitFormatOfFloat16IsRefused) {
  const auto rule = adam(StateFormat::kSplit);
  expect_thrown<InvalidArgument>(
      [&] {
        const TestStore store(SmallModel::row(1, 16, ScalarType::kFloat16).layout(64, rule.get()),
                              {.rule = rule});
      },
      "optimizer state format split splits the fp32 master of bfloat16 parameters, and chunk 0 "
      "holds float16; use format fp32");
}

TEST(StateStoreTest, ALayoutWithoutTheRulesAlignmentIsRefused) {
  expect_thrown<InvalidArgument>(
      [] {
        const TestStore store(SmallModel::row(1, 16, ScalarType::kBFloat16).layout(64),
                              {.rule = adam(StateFormat::kSplitInt8)});
      },
      "chunk 0 of 64 bytes is not aligned to 512");
}

TEST(StateStoreTest, ARuleOfWholeParametersIsRefusedWhereRanksShardThem) {
  const auto rule = std::make_shared<MatrixRule>();
  const TestStore alone(SmallModel::row(1, 32).layout(128), {.rule = rule});
  expect_thrown<InvalidArgument>(
      [&] {
        const TestStore store(SmallModel::row(1, 32).layout(128, nullptr, /*ranks=*/2),
                              {.rule = rule});
      },
      "the optimizer 'matrix' updates whole parameters, and 2 ranks keep parts of them");
}

TEST(StateStoreTest, StatesFitTheHostExactlyOrAreRefused) {
  const ChunkLayout layout = SmallModel::row(2, 16).layout(64);
  const std::size_t needed = 2 * 4 * 64;
  const TestStore store(layout, {.host_bytes = needed});
  EXPECT_EQ(store.host->ledger().used(), needed);
  expect_out_of_memory([&] { const TestStore refused(layout, {.host_bytes = needed - 1}); },
                       TierKind::kHost, 64, 63, needed - 1);
}

TEST(StateStoreTest, StatesOfAChunkOnTheDeviceArePaidThere) {
  const ChunkLayout layout = SmallModel::row(2, 16).layout(64);
  const StoreOptions options{.placements = {Placement::kDevice, Placement::kStream},
                             .device_bytes = 4 * 64};
  const TestStore store(layout, options);
  EXPECT_EQ(store.device_tier->ledger().used(), 4 * 64U);
  EXPECT_EQ(store.host->ledger().used(), 4 * 64U);
}

TEST(StateStoreTest, EachRankHasItsShardOfTheStates) {
  const ChunkLayout layout = SmallModel::row(1, 64).layout(256, nullptr, /*ranks=*/4);
  const TestStore store(layout, {});
  EXPECT_EQ(store.states->payload(chunk_id(0), kExpAvg).bytes(), 64U);
  EXPECT_EQ(store.states->payload(chunk_id(0), PayloadKind::kParam).bytes(), 256U);
  EXPECT_FALSE(store.states->shown(chunk_id(0)));
}

TEST(StateStoreTest, ElementsAreCountedFromTheParameterAndItsShard) {
  SmallModel model;
  model.add(20).add(44);  // at elements 0 and 32 of a chunk of 80
  const ChunkLayout layout = model.layout(1024, nullptr, /*ranks=*/2);
  const TestStore first(layout, {});
  ASSERT_EQ(layout.place(param_id(1)).offset, 32U);
  ASSERT_EQ(layout.chunk(chunk_id(0)).used_bytes, 384U);
  ChunkMemory memory{};
  std::vector<std::byte> values(384);
  memory[static_cast<std::size_t>(PayloadKind::kParam)] = values.data();
  memory[static_cast<std::size_t>(kExpAvg)] = values.data();
  EXPECT_EQ(first.states->element(memory, param_id(1), PayloadKind::kParam), values.data() + 128);
  EXPECT_EQ(first.states->element(memory, param_id(1), PayloadKind::kParam, 3),
            values.data() + 140);
  EXPECT_EQ(first.states->element(memory, param_id(1), kExpAvg, 3), values.data() + 140);
  EXPECT_EQ(first.states->element(memory, param_id(1), kExpAvgSq), nullptr);
  const ShardMap second(layout, 1);
  const SessionDevice device(std::make_shared<FakeDevice>());
  ChunkManager& manager = *first.manager;
  EXPECT_THROW(StateStore(manager, second, adam(), {false}, nullptr, nullptr, nullptr, nullptr,
                          nullptr, device),
               UsageError);  // its payloads are there
  const StateStore other(manager, second, nullptr, {false}, nullptr, nullptr, nullptr, nullptr,
                         nullptr, device);
  EXPECT_EQ(other.element(memory, param_id(1), PayloadKind::kParam), values.data() + 128);
}

class StatesOnNvmeTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kChunk = 4096;
  static constexpr std::size_t kChunks = 4;

  [[nodiscard]] StoreOptions options(std::size_t slots = 2) const {
    return {.states_on_nvme = std::vector<bool>(kChunks, true),
            .state_slots = slots,
            .directory = directory_.string()};
  }
  [[nodiscard]] std::unique_ptr<TestStore> make(const StoreOptions& options) const {
    return std::make_unique<TestStore>(SmallModel::row(kChunks, kChunk / 4).layout(kChunk),
                                       options);
  }
  /// Writes contents of their own to the chunks' states.
  static std::vector<Bytes> fill(const TestStore& store) {
    std::vector<Bytes> contents;
    for (std::size_t i = 0; i < kChunks; ++i) {
      contents.push_back(random_bytes(kChunk, static_cast<unsigned>(i) + 1));
      store.write_state(param_id(i), kExpAvg, contents.back());
    }
    store.states->flush();
    return contents;
  }
  static void expect(const TestStore& store, const std::vector<Bytes>& contents) {
    for (std::size_t i = 0; i < kChunks; ++i) {
      EXPECT_TRUE(store.read_state(param_id(i), kExpAvg) == contents[i]) << i;
    }
  }

  const test::TempDirectory directory_;
};

TEST_F(StatesOnNvmeTest, TakeNoHostMemoryButTheirWindow) {
  const auto store = make(options());
  const std::size_t window = 2 * 2 * kChunk + kIoAlignment - 1;
  EXPECT_EQ(store->host->ledger().used(), kChunks * 2 * kChunk + window);
  EXPECT_EQ(store->nvme->used_bytes(), kChunks * 2 * kChunk);
  EXPECT_TRUE(store->states->stored(chunk_id(1)));
  EXPECT_TRUE(store->states->partly_stored(chunk_id(1)));
  EXPECT_FALSE(store->states->shown(chunk_id(1)));
  EXPECT_EQ(store->manager->payload(chunk_id(1), kExpAvg), nullptr);
  EXPECT_EQ(store->states->element(param_id(1), kExpAvg), nullptr);
  const std::vector<std::pair<PayloadKind, std::size_t>> payloads = {{kExpAvg, kChunk},
                                                                     {kExpAvgSq, kChunk}};
  EXPECT_EQ(store->states->stored_payloads(chunk_id(1)), payloads);
}

TEST_F(StatesOnNvmeTest, ChunksWhoseStatesAreInMemoryAreNotStored) {
  StoreOptions some = options();
  some.states_on_nvme = {true, false, true, false};
  const auto store = make(some);
  EXPECT_FALSE(store->states->stored(chunk_id(1)));
  EXPECT_FALSE(store->states->partly_stored(chunk_id(1)));
  EXPECT_TRUE(store->states->shown(chunk_id(1)));
  EXPECT_TRUE(store->states->stored_payloads(chunk_id(1)).empty());
  const std::byte* const address = store->manager->payload(chunk_id(1), kExpAvg)->data();
  store->states->with_states(chunk_id(1), StreamAccess::kRead, [&](const ChunkMemory& memory) {
    EXPECT_EQ(at(memory, kExpAvg), address);
    EXPECT_EQ(at(memory, PayloadKind::kParam), nullptr);
  });
}

TEST_F(StatesOnNvmeTest, BeginAsZeros) {
  const auto store = make(options());
  EXPECT_EQ(store->read_state(param_id(2), kExpAvgSq), Bytes(kChunk));
}

TEST_F(StatesOnNvmeTest, KeepTheirBytesInAnyNumberOfWindowBuffers) {
  for (const std::size_t slots : {1, 2, 3}) {
    const auto store = make(options(slots));
    const auto contents = fill(*store);
    expect(*store, contents);
    expect(*store, contents);
    EXPECT_FALSE(store->states->torn());
  }
}

TEST_F(StatesOnNvmeTest, AnUpdateIsWrittenAtOnceAndAnEditWhenItsMemoryIsNeeded) {
  const auto store = make(options());
  ChunkStream& stream = *store->nvme->stream(StoragePlan::kStates);
  store->states->with_states(chunk_id(0), StreamAccess::kEdit, [](const ChunkMemory&) {});
  EXPECT_EQ(stream.counts().written_bytes, 0U);
  store->states->with_states(chunk_id(1), StreamAccess::kUpdate, [](const ChunkMemory&) {});
  EXPECT_EQ(stream.counts().written_bytes, 2 * kChunk);
  store->states->flush();
  EXPECT_EQ(stream.counts().written_bytes, 4 * kChunk);
}

TEST_F(StatesOnNvmeTest, WhatWorkThatThrowsHasLeftCounts) {
  const auto store = make(options(1));
  EXPECT_THROW(store->states->with_states(chunk_id(0), StreamAccess::kUpdate,
                                          [](const ChunkMemory& memory) {
                                            *at(memory, kExpAvg) = std::byte{9};
                                            throw InjectedFailure("work");
                                          }),
               InjectedFailure);
  EXPECT_EQ(store->read_state(param_id(1), kExpAvg), Bytes(kChunk));  // displaces it
  EXPECT_EQ(store->read_state(param_id(0), kExpAvg)[0], std::byte{9});
}

TEST_F(StatesOnNvmeTest, AnnouncedChunksAreReadAhead) {
  const auto store = make(options(3));
  const auto contents = fill(*store);
  const auto read_bytes = [&] {
    return store->nvme->stream(StoragePlan::kStates)->counts().read_bytes;
  };
  expect(*store, contents);  // leaves the last three in the window
  const std::uint64_t before = read_bytes();
  const ChunkId chunks[] = {chunk_id(0)};
  store->states->announce(chunks);
  EXPECT_EQ(read_bytes(), before + 2 * kChunk);
  EXPECT_TRUE(store->read_state(param_id(0), kExpAvg) == contents[0]);
  EXPECT_EQ(read_bytes(), before + 2 * kChunk);
}

TEST_F(StatesOnNvmeTest, AnnouncingMoreThanTheWindowHoldsTakesNothingAway) {
  const auto store = make(options(2));
  const auto contents = fill(*store);
  store->states->announce(store->chunks());
  expect(*store, contents);
}

TEST_F(StatesOnNvmeTest, DiscardedStatesAreZeros) {
  const auto store = make(options());
  fill(*store);
  store->states->discard_stored();
  expect(*store, std::vector<Bytes>(kChunks, Bytes(kChunk)));
}

TEST_F(StatesOnNvmeTest, DiscardingLeavesStatesInMemoryAlone) {
  StoreOptions some = options();
  some.states_on_nvme = {true, false, true, false};
  const auto store = make(some);
  auto contents = fill(*store);
  store->states->discard_stored();
  contents[0] = contents[2] = Bytes(kChunk);
  expect(*store, contents);
}

TEST_F(StatesOnNvmeTest, AThreadThatPinsEveryWindowBufferIsRefusedAnother) {
  const auto store = make(options(1));
  const std::size_t chunk = 2 * kChunk;
  store->states->with_states(chunk_id(0), StreamAccess::kRead, [&](const ChunkMemory&) {
    expect_out_of_memory(
        [&] {
          store->states->with_states(chunk_id(1), StreamAccess::kRead, [](const ChunkMemory&) {});
        },
        TierKind::kHost, chunk, 0, chunk);
  });
  EXPECT_EQ(store->read_state(param_id(1), kExpAvg), Bytes(kChunk));
}

TEST_F(StatesOnNvmeTest, NoRoomForTheWindowIsRefusedWithItsFigures) {
  const std::size_t window = 2 * 2 * kChunk + kIoAlignment - 1;
  StoreOptions little = options();
  little.host_bytes = window - 1;
  expect_out_of_memory([&] { static_cast<void>(make(little)); }, TierKind::kHost, window,
                       window - 1, window - 1);
  EXPECT_TRUE(directory_.empty());
}

TEST_F(StatesOnNvmeTest, AReadThatFailsIsTheCallersErrorAndHarmsNothing) {
  for (const int call : {1, 2}) {  // of the two payloads
    std::unique_ptr<TestStore> store;
    {
      const ScopedFaults faults("read:" + std::to_string(call) + ":EIO");
      store = make(options(1));
    }
    const auto contents = fill(*store);
    const auto error =
        thrown<IoError>([&] { static_cast<void>(store->read_state(param_id(0), kExpAvg)); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->error_number(), EIO);
    EXPECT_FALSE(store->states->torn());
    expect(*store, contents);
  }
}

TEST_F(StatesOnNvmeTest, AShortReadAndAnInterruptedOneAreContinued) {
  for (const char* const fault :
       {"read:1:short", "read:2:EINTR", "write:1:short", "any:3:EAGAIN"}) {
    std::unique_ptr<TestStore> store;
    {
      const ScopedFaults faults(fault);
      store = make(options(1));
    }
    expect(*store, fill(*store));
    EXPECT_FALSE(store->states->torn()) << fault;
  }
}

TEST_F(StatesOnNvmeTest, AFlippedBitIsFound) {
  std::unique_ptr<TestStore> store;
  {
    const ScopedFaults faults("read:1:flip");
    store = make(options(1));
  }
  const auto contents = fill(*store);
  expect_thrown<CorruptionError>(
      [&] { static_cast<void>(store->read_state(param_id(0), kExpAvg)); }, "exp_avg of chunk 0");
  EXPECT_FALSE(store->states->torn());
  expect(*store, contents);  // the disk has it as it was written
}

TEST_F(StatesOnNvmeTest, AWriteThatFailsTearsTheStatesUntilTheyAreDiscarded) {
  for (const int call : {1, 2, 3}) {
    std::unique_ptr<TestStore> store;
    {
      const ScopedFaults faults("write:" + std::to_string(call) + ":ENOSPC");
      store = make(options(1));
    }
    const auto error = thrown<IoError>([&] { fill(*store); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->error_number(), ENOSPC);
    EXPECT_TRUE(store->states->torn());
    const ParamId lost = param_id(call <= 2 ? 0 : 1);
    EXPECT_THROW(static_cast<void>(store->read_state(lost, kExpAvg)), UsageError);
    store->states->discard_stored();
    EXPECT_FALSE(store->states->torn());
    expect(*store, fill(*store));
  }
}

TEST_F(StatesOnNvmeTest, AFailedWriteInFlushReachesItsCaller) {
  std::unique_ptr<TestStore> store;
  {
    const ScopedFaults faults("write:1+:EIO");
    store = make(options(2));
  }
  store->states->with_states(chunk_id(0), StreamAccess::kEdit, [](const ChunkMemory&) {});
  EXPECT_FALSE(store->states->torn());
  EXPECT_THROW(store->states->flush(), IoError);
  EXPECT_TRUE(store->states->torn());
}

TEST_F(StatesOnNvmeTest, ThreadsWorkOnChunksOfTheirOwn) {
  const auto store = make(options(2));
  constexpr int kRounds = 20;
  {
    std::vector<std::jthread> threads;
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      threads.emplace_back([&store, chunk] {
        for (int round = 0; round < kRounds; ++round) {
          store->states->with_states(
              chunk_id(chunk), StreamAccess::kUpdate, [&](const ChunkMemory& memory) {
                for (std::size_t i = 0; i < kChunk; ++i) {
                  std::byte& value = at(memory, kExpAvg)[i];
                  value = static_cast<std::byte>(static_cast<std::size_t>(value) + chunk + 1);
                }
              });
        }
      });
    }
  }
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    EXPECT_EQ(store->read_state(param_id(chunk), kExpAvg),
              Bytes(kChunk, static_cast<std::byte>(kRounds * (chunk + 1))));
  }
}

TEST_F(StatesOnNvmeTest, AnUpdateHasWeightsAndStatesWhereverTheyAre) {
  for (const bool states : {false, true}) {
    for (const bool weights : {false, true}) {
      const auto store = make({.states_on_nvme = std::vector<bool>(kChunks, states),
                               .weights_on_nvme = std::vector<bool>(kChunks, weights),
                               .state_slots = 1,
                               .directory = directory_.string()});
      for (std::size_t i = 0; i < kChunks; ++i) {
        store->states->with_all(chunk_id(i), [&](const ChunkMemory& memory) {
          for (const PayloadKind kind : {PayloadKind::kParam, kExpAvg, kExpAvgSq}) {
            std::fill_n(at(memory, kind), kChunk, static_cast<std::byte>(i + 1));
          }
          EXPECT_NE(at(memory, PayloadKind::kGrad), nullptr);
          EXPECT_EQ(at(memory, kMasterPayload), nullptr);
        });
      }
      for (std::size_t i = 0; i < kChunks; ++i) {
        const Bytes expected(kChunk, static_cast<std::byte>(i + 1));
        EXPECT_TRUE(store->read_weights(param_id(i)) == expected);
        EXPECT_TRUE(store->read_state(param_id(i), kExpAvg) == expected);
        EXPECT_TRUE(store->read_state(param_id(i), kExpAvgSq) == expected);
      }
    }
  }
}

TEST_F(StatesOnNvmeTest, AFailedWriteOfUpdatedWeightsTearsThemAndNotTheStates) {
  std::unique_ptr<TestStore> store;
  {
    const ScopedFaults faults("write:1+:EIO");
    store = make(
        {.weights_on_nvme = std::vector<bool>(kChunks, true), .directory = directory_.string()});
  }
  store->states->with_all(chunk_id(0), [](const ChunkMemory&) {});
  EXPECT_THROW(store->nvme->stream(StoragePlan::kWeights)->flush(), IoError);
  EXPECT_TRUE(store->weights->torn());
  EXPECT_FALSE(store->states->torn());
  expect_thrown<UsageError>([&] { static_cast<void>(store->read_weights(param_id(0))); },
                            "parameters of chunk 0");
}

TEST_F(StatesOnNvmeTest, AnUpdateThatIsRefusedAWindowBufferPinsNone) {
  const auto store = make({.states_on_nvme = std::vector<bool>(kChunks, true),
                           .weights_on_nvme = std::vector<bool>(kChunks, true),
                           .state_slots = 1,
                           .directory = directory_.string()});
  store->states->with_states(chunk_id(1), StreamAccess::kRead, [&](const ChunkMemory&) {
    expect_out_of_memory(
        [&] { store->states->with_all(chunk_id(0), [](const ChunkMemory&) { ADD_FAILURE(); }); },
        TierKind::kHost, 2 * kChunk, 0, 2 * kChunk);
  });
  const WeightUse most[] = {{.part = 0}, {.part = 1}, {.part = 2}, {.part = 3}, {.part = 4}};
  EXPECT_NE(store->weights->visit(most), nullptr);  // all five are free
}

class StatesOnDeviceTest : public ::testing::Test {
 protected:
  const TestStore store_{SmallModel::row(1, 16).layout(64),
                         {.placements = {Placement::kDevice}, .device = Computes::kByItself}};
};

TEST_F(StatesOnDeviceTest, TheHostGetsCopiesThatReadsDoNotWriteBack) {
  EXPECT_TRUE(store_.states->on_device(chunk_id(0)));
  EXPECT_FALSE(store_.states->shown(chunk_id(0)));
  const std::byte* const address = store_.states->payload(chunk_id(0), kExpAvg).data();
  store_.states->with_states(chunk_id(0), StreamAccess::kRead, [&](const ChunkMemory& memory) {
    EXPECT_NE(at(memory, kExpAvg), address);
    *at(memory, kExpAvg) = std::byte{1};
  });
  EXPECT_EQ(store_.backend->bytes_copied_from(), 2 * 64U);
  EXPECT_EQ(store_.backend->bytes_copied_to(), 0U);
  EXPECT_EQ(*address, std::byte{0});
}

TEST_F(StatesOnDeviceTest, ChangesGoBackToTheDevice) {
  for (const StreamAccess access : {StreamAccess::kEdit, StreamAccess::kUpdate}) {
    const std::size_t before = store_.backend->bytes_copied_to();
    store_.states->with_states(chunk_id(0), access, [&](const ChunkMemory& memory) {
      *at(memory, kExpAvgSq) = static_cast<std::byte>(static_cast<int>(access) + 5);
    });
    EXPECT_EQ(store_.backend->bytes_copied_to() - before, 2 * 64U);
    EXPECT_EQ(*store_.states->payload(chunk_id(0), kExpAvgSq).data(),
              static_cast<std::byte>(static_cast<int>(access) + 5));
  }
}

TEST_F(StatesOnDeviceTest, ChangesOfWorkThatThrowsStayBehind) {
  EXPECT_THROW(store_.states->with_states(chunk_id(0), StreamAccess::kUpdate,
                                          [](const ChunkMemory& memory) {
                                            *at(memory, kExpAvg) = std::byte{1};
                                            throw InjectedFailure("work");
                                          }),
               InjectedFailure);
  EXPECT_EQ(*store_.states->payload(chunk_id(0), kExpAvg).data(), std::byte{0});
}

TEST_F(StatesOnDeviceTest, ALoadOfWeightsIsCopiedThere) {
  const Bytes values = random_bytes(64, 3);
  store_.write_weights(param_id(0), values);
  EXPECT_EQ(store_.backend->bytes_copied_to(), 64U);
  EXPECT_EQ(
      store_.states->bytes_of_device(store_.states->element(param_id(0), PayloadKind::kParam), 64),
      values);
}

TEST_F(StatesOnDeviceTest, AParameterWithoutElementsIsLoadedThere) {
  SmallModel model;
  model.add(0).add(4);
  const TestStore store(model.layout(64),
                        {.placements = {Placement::kDevice}, .device = Computes::kByItself});
  store.write_weights(param_id(0), {});
  EXPECT_EQ(store.backend->bytes_copied_to(), 0U);
  EXPECT_TRUE(store.states->bytes_of_device(nullptr, 0).empty());
}

TEST_F(StatesOnDeviceTest, StatesFollowAChunkThatIsPromotedAndDemoted) {
  const TestStore store(SmallModel::row(1, 16).layout(64), {.device = Computes::kByItself});
  const Bytes values = random_bytes(64, 5);
  store.write_state(param_id(0), kExpAvg, values);
  EXPECT_EQ(store.backend->bytes_copied_to(), 0U);
  ASSERT_TRUE(store.manager->try_promote(chunk_id(0)));
  EXPECT_TRUE(store.states->on_device(chunk_id(0)));
  EXPECT_EQ(store.read_state(param_id(0), kExpAvg), values);
  store.manager->demote(chunk_id(0));
  EXPECT_FALSE(store.states->on_device(chunk_id(0)));
  EXPECT_EQ(store.read_state(param_id(0), kExpAvg), values);
}

TEST(HostStorageTest, ALoadWaitsForCopiesThatReadTheHostStorage) {
  const TestStore store(SmallModel::row(1, 16).layout(64), {});
  store.write_weights(param_id(0), random_bytes(64, 1));
  EXPECT_EQ(store.backend->written_by_host(),
            std::vector<const std::byte*>{store.states->weights(chunk_id(0)).data()});
  EXPECT_EQ(store.read_weights(param_id(0)), random_bytes(64, 1));
}

TEST(HostStorageTest, AFailedWaitForCopiesLeavesTheWeights) {
  const TestStore store(SmallModel::row(1, 16).layout(64), {});
  store.backend->fail_next();
  EXPECT_THROW(store.write_weights(param_id(0), random_bytes(64, 1)), InjectedFailure);
  EXPECT_EQ(store.read_weights(param_id(0)), Bytes(64));
}

TEST(HostStorageTest, OperatorsMayChangeWeightsThatAreNotSharded) {
  const TestStore store(SmallModel::row(1, 16).layout(64), {});
  store.states->check_writable(param_id(0));
  store.states->begin_update(chunk_id(0));  // no effect
  store.states->end_update(chunk_id(0));
  EXPECT_FALSE(store.states->sharded(chunk_id(0)));
  store.states->flush();
  store.states->discard_stored();
  EXPECT_FALSE(store.states->torn());
}

}  // namespace
}  // namespace castor::testing
