// Updates of small models, one element of which is enough to see who has run: with Adam, a first
// step moves a weight by almost the learning rate, against its gradient's sign.

#include "store/chunk_updates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;
using Updates = std::vector<std::vector<ParamUpdate>>;

constexpr std::size_t kNumel = 1024;
constexpr std::size_t kChunk = 4 * kNumel;
constexpr std::size_t kChunks = 3;
constexpr double kRate = 0.5;

Bytes floats(float value, std::size_t numel = kNumel) { return filled_with(value, numel); }

float first_of(const Bytes& bytes) {
  float value = 0;
  std::memcpy(&value, bytes.data(), 4);
  return value;
}

class ChunkUpdatesTest : public ::testing::Test {
 protected:
  void SetUp() override { make({}); }

  void make(StoreOptions options, const std::string& faults = "") {
    store_.reset();
    const ScopedFaults scope(faults);
    options.directory = directory_.string();
    store_ = std::make_unique<TestStore>(SmallModel::row(kChunks, kNumel).layout(kChunk),
                                         std::move(options));
    for (std::size_t i = 0; i < kChunks; ++i) {
      store_->write_gradient(param_id(i), floats(1.0F));
    }
  }
  [[nodiscard]] ChunkUpdates& updates() const { return *store_->updates; }
  [[nodiscard]] ParamUpdate update_of(std::size_t param, std::int64_t step = 1) const {
    return updates().update_of(param_id(param), adam_options(kRate), step, 1.0);
  }
  void run(std::size_t chunk, std::int64_t step = 1) const {
    const ParamUpdate update = update_of(chunk, step);
    updates().run(chunk_id(chunk), std::span(&update, 1));
  }
  [[nodiscard]] Updates all(std::int64_t step = 1) const {
    Updates updates;
    for (std::size_t i = 0; i < kChunks; ++i) {
      updates.push_back({update_of(i, step)});
    }
    return updates;
  }
  [[nodiscard]] float weight(std::size_t param) const {
    return first_of(store_->read_weights(param_id(param)));
  }
  /// Returns whether a first step has been taken.
  [[nodiscard]] bool updated(std::size_t param) const {
    const float value = weight(param);
    EXPECT_TRUE(value == 0.0F || std::abs(value + kRate) < 1e-4) << value;
    return value != 0.0F;
  }
  static StoreOptions on_nvme(std::vector<bool> states, std::vector<bool> weights = {}) {
    return {.states_on_nvme = std::move(states), .weights_on_nvme = std::move(weights)};
  }

  const test::TempDirectory directory_;
  std::unique_ptr<TestStore> store_;
};

TEST_F(ChunkUpdatesTest, AProcessThatIsAloneWaitsForNoRank) {
  EXPECT_FALSE(updates().collective());
}

TEST_F(ChunkUpdatesTest, WithoutARuleThereIsNothingToRun) {
  const TestStore store(SmallModel::row(1, 16).layout(64), {.rule = nullptr});
  expect_thrown<UsageError>([&] { static_cast<void>(store.updates->rule()); },
                            "another optimizer than castor's");
  EXPECT_EQ(updates().rule().name(), "adam");
}

TEST_F(ChunkUpdatesTest, RoundingStreamsAreOnePerParameter) {
  updates().set_rounding(1, {1, 2, 3});
  expect_thrown<InvalidArgument>(
      [&] {
        updates().set_rounding(1, {1, 2});
      },
      "there are 2 rounding streams for 3 parameters");
  expect_thrown<InvalidArgument>([&] { updates().set_rounding(1, {}); }, "there are 0");
}

TEST_F(ChunkUpdatesTest, OptionsOutOfRangeAreRefusedBeforeAnythingChanges) {
  EXPECT_THROW(
      static_cast<void>(updates().update_of(param_id(0), adam_options(/*lr=*/-1.0), 1, 1.0)),
      InvalidArgument);
  EXPECT_THROW(static_cast<void>(updates().update_of(param_id(0), adam_options(), 0, 1.0)),
               InvalidArgument);
  EXPECT_FALSE(updated(0));
}

TEST_F(ChunkUpdatesTest, AnUpdateChangesItsChunkAlone) {
  run(1);
  EXPECT_FALSE(updated(0));
  EXPECT_TRUE(updated(1));
  EXPECT_FALSE(updated(2));
  EXPECT_NE(store_->read_state(param_id(1), rule_payload(0)), Bytes(kChunk));
  EXPECT_EQ(store_->read_state(param_id(2), rule_payload(0)), Bytes(kChunk));
}

TEST_F(ChunkUpdatesTest, ParametersWithoutAnUpdateStayAsTheyAre) {
  SmallModel model;
  model.add(16).add(16).add(0);
  const TestStore store(model.layout(256), {});
  store.backend->set_stream(StreamId{1});
  const ParamUpdate updates[] = {store.updates->update_of(param_id(1), adam_options(), 1, 1.0),
                                 store.updates->update_of(param_id(2), adam_options(), 1, 1.0)};
  std::memset(store.states->element(param_id(0), PayloadKind::kGrad), 0x3f, 64);
  std::memset(store.states->element(param_id(1), PayloadKind::kGrad), 0x3f, 64);
  store.updates->run(chunk_id(0), updates);
  EXPECT_EQ(store.read_weights(param_id(0)), Bytes(64));
  EXPECT_NE(store.read_weights(param_id(1)), Bytes(64));
}

TEST_F(ChunkUpdatesTest, NoUpdatesChangeNothing) {
  updates().run(chunk_id(0), {});
  std::size_t num_begun = 0;
  updates().run_all(Updates(kChunks), num_begun);
  EXPECT_EQ(num_begun, 0U);
  EXPECT_FALSE(updated(0));
}

TEST_F(ChunkUpdatesTest, AnUpdateWaitsForCopiesThatReadTheHostStorage) {
  const std::size_t before = store_->backend->written_by_host().size();
  run(0);
  ASSERT_EQ(store_->backend->written_by_host().size(), before + 1);
  EXPECT_EQ(store_->backend->written_by_host().back(), store_->states->weights(chunk_id(0)).data());
  store_->backend->fail_next();
  EXPECT_THROW(run(1), InjectedFailure);
  EXPECT_FALSE(updated(1));
}

TEST_F(ChunkUpdatesTest, AllChunksAreUpdatedAndCountedWhereverTheyAre) {
  const std::vector<bool> none(kChunks, false);
  const std::vector<bool> all_chunks(kChunks, true);
  const std::vector<bool> some = {false, true, false};
  const std::vector<bool> others = {true, false, true};
  for (const auto& states : {none, some, others, all_chunks}) {
    for (const auto& weights : {none, some, others, all_chunks}) {
      make(on_nvme(states, weights));
      std::size_t num_begun = 0;
      updates().run_all(all(), num_begun);
      EXPECT_EQ(num_begun, kChunks);
      for (std::size_t i = 0; i < kChunks; ++i) {
        EXPECT_TRUE(updated(i)) << i;
      }
    }
  }
}

TEST_F(ChunkUpdatesTest, AllChangesAreOnNvmeWhenAllUpdatesHaveReturned) {
  make(on_nvme({true, true, true}));
  std::size_t num_begun = 0;
  updates().run_all(all(), num_begun);
  ChunkStream& stream = *store_->nvme->stream(StoragePlan::kStates);
  EXPECT_EQ(stream.counts().written_bytes, kChunks * 2 * kChunk);
  stream.flush();
  EXPECT_EQ(stream.counts().written_bytes, kChunks * 2 * kChunk);  // nothing was left
}

// With one buffer, a chunk's two states are read, and written, before those of the next one.
TEST_F(ChunkUpdatesTest, AFailedReadStopsUpdatesAndSaysHowManyHaveBegun) {
  for (std::size_t call = 1; call <= 2 * kChunks; ++call) {
    StoreOptions options = on_nvme({true, true, true});
    options.state_slots = 1;
    make(options, "read:" + std::to_string(call) + ":EIO");
    std::size_t num_begun = 0;
    updates().run_all(all(), num_begun);  // fresh states are zeros, which are not read
    num_begun = 0;
    const auto error = thrown<IoError>([&] { updates().run_all(all(2), num_begun); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->error_number(), EIO);
    EXPECT_EQ(num_begun, (call - 1) / 2);
    for (std::size_t i = 0; i < kChunks; ++i) {
      EXPECT_EQ(weight(i) < -1.5 * kRate, i < num_begun) << i;
    }
    EXPECT_FALSE(store_->states->torn());
    updates().run_all(all(2), num_begun);  // NVMe has what it had
  }
}

TEST_F(ChunkUpdatesTest, AFailedWriteStopsUpdatesAndTearsTheStates) {
  for (std::size_t call = 1; call <= 2 * kChunks; ++call) {
    StoreOptions options = on_nvme({true, true, true});
    options.state_slots = 1;
    make(options, "write:" + std::to_string(call) + ":ENOSPC");
    std::size_t num_begun = 0;
    const auto error = thrown<IoError>([&] { updates().run_all(all(), num_begun); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->error_number(), ENOSPC);
    EXPECT_EQ(num_begun, (call + 1) / 2);
    for (std::size_t i = 0; i < kChunks; ++i) {
      EXPECT_EQ(updated(i), i < num_begun) << i;
    }
    EXPECT_TRUE(store_->states->torn());
    store_->states->discard_stored();
    updates().run_all(all(), num_begun);
    EXPECT_FALSE(store_->states->torn());
  }
}

TEST_F(ChunkUpdatesTest, NumBegunAddsUpOverCalls) {
  std::size_t num_begun = 40;
  updates().run_all(all(), num_begun);
  EXPECT_EQ(num_begun, 40 + kChunks);
}

TEST_F(ChunkUpdatesTest, AChunkOnTheDeviceIsUpdatedByItsKernelsOnTheSessionsStream) {
  make({.placements = {Placement::kDevice, Placement::kStream, Placement::kDevice},
        .device = Computes::kByItself});
  store_->backend->set_stream(StreamId{6});
  store_->device.follow_stream();
  run(0);
  EXPECT_EQ(store_->backend->updates(), std::vector<StreamId>{StreamId{6}});
  EXPECT_TRUE(updated(0));
  run(1);
  EXPECT_EQ(store_->backend->updates().size(), 1U);  // the host has it
  std::size_t num_begun = 0;
  Updates some(kChunks);
  some[0] = {update_of(0, 2)};
  some[2] = {update_of(2)};
  updates().run_all(some, num_begun);
  EXPECT_EQ(store_->backend->updates().size(), 2U);  // both together
  EXPECT_EQ(num_begun, 2U);
}

TEST_F(ChunkUpdatesTest, TypesOfOneModelAreUpdatedByTheirOwnRules) {
  const auto rule = adam(StateFormat::kSplitInt8);
  SmallModel model;
  model.add(256, ScalarType::kBFloat16).add(128, ScalarType::kFloat32);
  TestStore store(model.layout(1024, rule.get()), {.rule = rule});
  store.write_gradient(param_id(0), Bytes(512, std::byte{0x3f}));
  store.write_gradient(param_id(1), floats(1.0F, 128));
  Updates both = {{store.updates->update_of(param_id(0), adam_options(kRate), 1, 1.0)},
                  {store.updates->update_of(param_id(1), adam_options(kRate), 1, 1.0)}};
  std::size_t num_begun = 0;
  store.updates->run_all(both, num_begun);
  EXPECT_EQ(num_begun, 2U);
  EXPECT_NEAR(first_of(store.read_weights(param_id(1))), -kRate, 1e-4);
  const Bytes bf16 = store.read_weights(param_id(0));
  EXPECT_EQ(bf16[1], std::byte{0xbf});  // about -0.5 in bf16: 0xbf00
}

TEST_F(ChunkUpdatesTest, AnUpdateOfAChunkThatIsReadTakesItsCopyFirst) {
  store_->reads.begin();
  const auto chunks = store_->chunks();
  ASSERT_EQ(store_->copies->begin(chunks, true, kChunks * 3 * kChunk), kChunks * 3 * kChunk);
  run(1);
  EXPECT_FALSE(store_->reads.reading(chunk_id(1)));
  EXPECT_TRUE(store_->reads.reading(chunk_id(0)));
  const auto piece = store_->copies->piece(param_id(1), PayloadKind::kParam);
  EXPECT_EQ(Bytes(piece.data.get(), piece.data.get() + piece.size), Bytes(kChunk));
  EXPECT_TRUE(updated(1));
  store_->copies->end();
}

TEST_F(ChunkUpdatesTest, AnUpdateWaitsForAReaderThatReadsInPlace) {
  store_->reads.begin();
  std::atomic<bool> read = false;
  std::thread updating([&] {
    run(0);
    EXPECT_TRUE(read);
  });
  EXPECT_EQ(weight(0), 0.0F);
  read = true;
  store_->reads.end_all();
  updating.join();
  EXPECT_TRUE(updated(0));
}

TEST_F(ChunkUpdatesTest, ChunksBeforeTheOneThatIsReadAreUpdatedMeanwhile) {
  make({.placements = {Placement::kDevice, Placement::kStream, Placement::kStream},
        .device = Computes::kByItself});
  store_->reads.begin();
  store_->reads.end(chunk_id(0));
  store_->reads.end(chunk_id(2));
  std::size_t num_begun = 0;
  std::thread updating([&] { updates().run_all(all(), num_begun); });
  // The reader looks at chunk 1 until chunk 0 has been updated.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (store_->backend->updates().empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(store_->backend->updates().size(), 1U);
  EXPECT_FALSE(updated(1));
  store_->reads.end(chunk_id(1));
  updating.join();
  EXPECT_EQ(num_begun, kChunks);
  EXPECT_TRUE(updated(1));
  EXPECT_TRUE(updated(2));
}

TEST_F(ChunkUpdatesTest, ThreadsUpdateChunksOfTheirOwn) {
  for (const bool stored : {false, true}) {
    make(on_nvme(std::vector<bool>(kChunks, stored), std::vector<bool>(kChunks, stored)));
    constexpr std::int64_t kSteps = 10;
    {
      std::vector<std::jthread> threads;
      for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
        threads.emplace_back([this, chunk] {
          for (std::int64_t step = 1; step <= kSteps; ++step) {
            run(chunk, step);
          }
        });
      }
    }
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(weight(chunk), weight(0));
      EXPECT_NEAR(weight(chunk), -kRate * kSteps, 1e-2);
    }
  }
}

TEST_F(ChunkUpdatesTest, EveryWindowBufferTakenIsRefusedAndChangesNothing) {
  TestStore one(SmallModel::row(kChunks, kNumel).layout(kChunk),
                {.states_on_nvme = {true, true, true},
                 .state_slots = 1,
                 .directory = directory_.string(),
                 .file_name = "other.scratch"});
  const ParamUpdate update = one.updates->update_of(param_id(1), adam_options(), 1, 1.0);
  one.states->with_states(chunk_id(0), StreamAccess::kRead, [&](const ChunkMemory&) {
    expect_out_of_memory([&] { one.updates->run(chunk_id(1), std::span(&update, 1)); },
                         TierKind::kHost, 2 * kChunk, 0, 2 * kChunk);
  });
  EXPECT_EQ(one.read_weights(param_id(1)), Bytes(kChunk));
}

}  // namespace
}  // namespace castor::testing
