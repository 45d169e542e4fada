// A layer of four experts with two parameters: rows of 16 and of 8 bytes. Then what a session asks
// the runtime for before rows of a step are read on the host.

#include "store/expert_rows.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"
#include "core/machine.h"
#include "core/steps.h"
#include "parallel/async_copy_engine.h"
#include "store/charged_memory.h"
#include "store/errors.h"
#include "store/fake_device.h"
#include "store/fake_experts.h"
#include "store/small_model.h"

namespace castor::testing {
namespace {

constexpr std::size_t kExpertBytes = 16 + 8;

class ExpertRowsTest : public ::testing::Test {
 protected:
  static ChunkLayout model() {
    SmallModel model;
    model.add(4 * 4).add(4 * 2);
    for (ParamSpec& param : model.params) {
      param.by_row = true;
    }
    return model.layout(256);
  }
  [[nodiscard]] ExpertParts parts() {
    return {.model = model_,
            .layout = layout_,
            .device = *ledger_,
            .nonmodel = *account_,
            .copies = copies_,
            .compute = device_,
            .take = charged_to(account_)};
  }
  void expect_rows(ExpertRows& rows, const std::vector<std::int64_t>& experts) {
    for (std::size_t param = 0; param < 2; ++param) {
      const std::size_t bytes = layer_.row_bytes[param];
      const DeviceMemory& memory = *rows.take(param);
      ASSERT_EQ(memory.bytes(), experts.size() * bytes);
      for (std::size_t i = 0; i < experts.size(); ++i) {
        EXPECT_EQ(std::memcmp(memory.data() + i * bytes,
                              model_.on_host(layer_.params[param]) +
                                  static_cast<std::size_t>(experts[i]) * bytes,
                              bytes),
                  0)
            << "parameter " << param << ", expert " << experts[i];
      }
    }
  }

  const ChunkLayout layout_ = model();
  const ExpertLayer layer_{
      .params = {ParamId{0}, ParamId{1}}, .row_bytes = {16, 8}, .num_experts = 4};
  const SessionDevice device_{std::make_shared<FakeDevice>()};
  bool fails_ = false;
  AsyncCopyEngine copies_{{.copy = [this](const CopyRequest& request) {
    if (fails_) {
      throw Error("the link is down");
    }
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }}};
  FakeExperts model_{layout_};
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>(TierKind::kDevice, 3 * kExpertBytes);
  std::shared_ptr<NonModelMemory> account_ = std::make_shared<NonModelMemory>(ledger_);
};

TEST_F(ExpertRowsTest, RowsComeInTheOrderOfTheExpertsAndAreFreedWithTheirLastUser) {
  auto rows = ExpertRows::fetch(parts(), layer_, std::vector<std::int64_t>{0, 2, 3});
  ASSERT_NE(rows, nullptr);
  EXPECT_EQ(rows->bytes(), 3 * kExpertBytes);
  EXPECT_EQ(account_->bytes(), 3 * kExpertBytes);
  EXPECT_EQ(model_.begun, layer_.chunks(layout_));
  expect_rows(*rows, {0, 2, 3});
  auto first = rows->take(0);
  rows.reset();
  EXPECT_EQ(account_->bytes(), std::size_t{3} * 16);
  first.reset();
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST_F(ExpertRowsTest, WhereHostStorageCannotBeReadByTheRowThereAreNone) {
  model_.rows = false;
  EXPECT_EQ(ExpertRows::fetch(parts(), layer_, std::vector<std::int64_t>{1}), nullptr);
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST_F(ExpertRowsTest, AnExpertThatTheLayerDoesNotHaveIsRefused) {
  for (const std::int64_t expert : {-1, 4}) {
    expect_thrown<InvalidArgument>(
        [&] {
          static_cast<void>(
              ExpertRows::fetch(parts(), layer_, std::vector<std::int64_t>{0, expert}));
        },
        "which has 4 experts");
  }
  EXPECT_TRUE(model_.begun.empty());
}

TEST_F(ExpertRowsTest, AheadOfTheirUseRowsComeWhereThereIsFreeRoomForThem) {
  const Reservation other = ledger_->reserve(kExpertBytes + 1, "");
  EXPECT_EQ(ExpertRows::fetch_ahead(parts(), layer_, std::vector<std::int64_t>{0, 1}), nullptr);
  EXPECT_TRUE(model_.begun.empty());
  const auto rows = ExpertRows::fetch_ahead(parts(), layer_, std::vector<std::int64_t>{1});
  ASSERT_NE(rows, nullptr);
  expect_rows(*rows, {1});
}

TEST_F(ExpertRowsTest, WithoutRoomForAllParametersNothingStays) {
  const Reservation other = ledger_->reserve(kExpertBytes, "");
  EXPECT_THROW(
      static_cast<void>(ExpertRows::fetch(parts(), layer_, std::vector<std::int64_t>{0, 1, 2})),
      OutOfMemory);
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST_F(ExpertRowsTest, AFailedCopyIsToldEachTimeThatItsRowsAreTaken) {
  fails_ = true;
  const auto rows = ExpertRows::fetch(parts(), layer_, std::vector<std::int64_t>{1});
  ASSERT_NE(rows, nullptr);
  EXPECT_THROW(static_cast<void>(rows->take(0)), Error);
  EXPECT_THROW(static_cast<void>(rows->take(0)), Error);
}

/// Three modules of one chunk each, of which rows of the second are read on the host.
struct RowsOfStep {
  SimulatedMachine machine{Net::row(3).layout(), 3 * Net::kChunk};
  const std::vector<ChunkId> second{chunk_id(1)};

  /// Enters the second module's forward of the next step; its chunk was fetched for it and left.
  void between_modules() {
    machine.run({enter(0), exit(0), enter(1), exit(1)});
    ASSERT_TRUE(machine.rig.manager->resident(chunk_id(1)));
  }
  [[nodiscard]] bool begin() { return machine.runtime->begin_rows_of_step(second); }
};

TEST(RowsOfStepTest, ThereAreNoneUntilAStepHasMadeAPlan) {
  RowsOfStep rows;
  EXPECT_FALSE(rows.begin()) << "no step is under way";
  rows.between_modules();
  EXPECT_FALSE(rows.begin()) << "the first step fetches chunks";
  EXPECT_TRUE(rows.machine.rig.manager->resident(chunk_id(1)));
}

TEST(RowsOfStepTest, TheChunksThatAreReadLeaveTheirSlotsAndNoOthers) {
  RowsOfStep rows;
  rows.machine.run(row_step(3));
  rows.machine.runtime->finish_step();
  rows.between_modules();
  EXPECT_TRUE(rows.begin());
  EXPECT_FALSE(rows.machine.rig.manager->resident(chunk_id(1)));
  EXPECT_TRUE(rows.machine.rig.manager->resident(chunk_id(0)));
  EXPECT_TRUE(rows.begin()) << "it has left";
  rows.machine.rig.expect_consistent();
}

TEST(RowsOfStepTest, PlansFetchAheadNoChunkWhoseRowsAreReadUntilAModuleUsesItAgain) {
  RowsOfStep rows;
  const auto there = [&] { return rows.machine.rig.manager->resident(chunk_id(1)); };
  rows.machine.run(row_step(3));
  rows.machine.runtime->finish_step();
  rows.machine.run({enter(0), exit(0)});
  EXPECT_TRUE(there()) << "the plan is of full layers";
  rows.machine.run({enter(1), exit(1), enter(2), exit(2), backward(2), backward(1), backward(0)});
  rows.machine.runtime->finish_step();
  rows.machine.runtime->expect_rows_of_step(rows.second);
  rows.machine.run({enter(0), exit(0)});
  EXPECT_FALSE(there()) << "rows will be read";
  EXPECT_TRUE(rows.begin());
  rows.machine.run({enter(1), exit(1)});
  EXPECT_TRUE(there()) << "a module needs all of it";
  rows.machine.run({enter(2), exit(2), backward(2), backward(1), backward(0)});
  rows.machine.runtime->finish_step();
  rows.machine.run({enter(0), exit(0)});
  EXPECT_TRUE(there()) << "the layer is back in the plan";
  EXPECT_TRUE(rows.begin());
  rows.machine.run({enter(2), exit(2), backward(2), backward(0)});
  rows.machine.runtime->finish_step();
  rows.machine.run({enter(0), exit(0)});
  EXPECT_FALSE(there()) << "its rows were read";
}

TEST(RowsOfStepTest, AChunkThatAModuleComputesWithStays) {
  RowsOfStep rows;
  rows.machine.run(row_step(3));
  rows.machine.runtime->finish_step();
  rows.machine.run({enter(0), exit(0), enter(1)});
  EXPECT_FALSE(rows.begin());
  EXPECT_TRUE(rows.machine.rig.manager->resident(chunk_id(1)));
  rows.machine.run({exit(1)});
  EXPECT_TRUE(rows.begin());
}

TEST(RowsOfStepTest, AChunkThatLivesOnTheDeviceStays) {
  SimulatedMachine machine(Net::row(2).layout(), 3 * Net::kChunk, {},
                           {Placement::kStream, Placement::kDevice});
  machine.run(row_step(2));
  machine.runtime->finish_step();
  machine.run({enter(0)});
  EXPECT_FALSE(machine.runtime->begin_rows_of_step(std::vector<ChunkId>{chunk_id(1)}));
}

TEST(RowsOfStepTest, APassWithoutGradientsIsNoStepAndAStepIsNoSuchPass) {
  RowsOfStep rows;
  rows.machine.run(row_step(3));
  rows.machine.runtime->finish_step();
  rows.machine.run({enter(0)}, PassMode::kInference);
  EXPECT_FALSE(rows.begin());
  EXPECT_TRUE(rows.machine.runtime->begin_rows(rows.second));
  rows.machine.run({exit(0)}, PassMode::kInference);
  EXPECT_FALSE(rows.machine.runtime->begin_rows(rows.second)) << "no forward is under way";
  rows.machine.run({enter(0)});
  EXPECT_FALSE(rows.machine.runtime->begin_rows(rows.second));
  EXPECT_TRUE(rows.begin());
}

}  // namespace
}  // namespace castor::testing
