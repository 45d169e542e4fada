#include "store/session_nvme.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/units.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

constexpr std::size_t kChunk = 4096;
constexpr std::size_t kChunks = 2;
constexpr std::size_t kStates = kChunks * 2 * kChunk;

class SessionNvmeTest : public ::testing::Test {
 protected:
  explicit SessionNvmeTest(std::size_t nvme_bytes = kStates) {
    options_.budgets = std::make_shared<SharedBudgets>(kGiB, kGiB, nvme_bytes);
    options_.backend = std::make_shared<FakeDevice>();
    options_.state.rule = adam();
    options_.state.nvme = NvmeOptions{.directories = {directory_.string()},
                                      .budget_bytes = nvme_bytes,
                                      .engine = IoEngineKind::kThreads,
                                      .depth = 1};
    options_.state.nvme_fraction = 1.0;
    ledger_ = nvme_ledger(options_, "model");
  }
  [[nodiscard]] StoragePlan plan() const {
    const ChunkLayout layout = SmallModel::row(kChunks, kChunk / 4).layout(kChunk);
    const std::vector<Placement> placements(kChunks, Placement::kStream);
    return plan_storage(layout, placements, options_.state, kGiB);
  }
  [[nodiscard]] std::unique_ptr<NvmeTier> make(Reservation& taken, std::size_t number = 1) {
    return make_nvme(plan(), options_, host_, executor_, ledger_.get(), number, taken);
  }

  const test::TempDirectory directory_{"/dev/shm"};
  MemoryTier host_{TierKind::kHost, kGiB,
                   std::make_unique<HeapArena>(std::make_shared<LiveBlocks>())};
  test::SerialExecutor executor_;
  SessionOptions options_;
  std::shared_ptr<Ledger> ledger_;
};

TEST_F(SessionNvmeTest, WithoutOptionsThereIsNoTier) {
  EXPECT_EQ(ledger_->owner(), "model");
  EXPECT_EQ(ledger_->tier(), TierKind::kNvme);
  options_.state.nvme.reset();
  EXPECT_EQ(nvme_ledger(options_, "model"), nullptr);
  Reservation taken;
  EXPECT_EQ(make(taken), nullptr);
  EXPECT_EQ(stream_of(nullptr, StoragePlan::kStates), nullptr);
}

TEST_F(SessionNvmeTest, WhatGoesThereIsTakenFromTheSharedBudget) {
  Reservation taken;
  const auto tier = make(taken);
  EXPECT_EQ(taken.bytes(), kStates);
  EXPECT_EQ(options_.budgets->nvme()->available(), 0U);
  EXPECT_EQ(tier->used_bytes(), kStates);
  EXPECT_NE(stream_of(tier, StoragePlan::kStates), nullptr);
  EXPECT_EQ(stream_of(tier, StoragePlan::kWeights), nullptr);
  EXPECT_EQ(stream_of(tier, StoragePlan::kActivations), nullptr);
}

TEST_F(SessionNvmeTest, WhereNothingGoesThereNoTierIsMade) {
  options_.state.nvme_fraction = 0.0;
  Reservation taken;
  EXPECT_EQ(make(taken), nullptr);
  EXPECT_EQ(taken.bytes(), 0U);
  EXPECT_TRUE(directory_.empty());
}

TEST_F(SessionNvmeTest, EachModelHasFilesOfItsOwn) {
  for (const std::size_t number : {1, 2, 12}) {
    Reservation taken;
    const auto tier = make(taken, number);
    const std::string name = number == 1 ? "castor" : "castor-" + std::to_string(number);
    EXPECT_NE(tier->description().find("/" + name + ".scratch"), std::string::npos)
        << tier->description();
  }
}

TEST_F(SessionNvmeTest, APayloadBeyondTheBudgetIsRefusedAndLeavesNothing) {
  options_.state.nvme->budget_bytes = kStates - 1;
  Reservation taken;
  expect_out_of_memory([&] { static_cast<void>(make(taken)); }, TierKind::kNvme, kStates,
                       kStates - 1, kStates - 1);
  EXPECT_EQ(taken.bytes(), 0U);
  EXPECT_EQ(host_.ledger().used(), 0U);
  EXPECT_TRUE(directory_.empty());
}

TEST_F(SessionNvmeTest, WhatAnotherModelHasTakenMeanwhileIsRefused) {
  Ledger other(options_.budgets->nvme(), "another model");
  const Reservation one = other.reserve(1, "");
  Reservation taken;
  const auto error = thrown<OutOfMemory>([&] { static_cast<void>(make(taken)); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->requested(), kStates);
  EXPECT_EQ(error->available(), kStates - 1);
  EXPECT_EQ(error->budget(), kStates);
  const std::string message = error->what();
  EXPECT_NE(message.find("another model has taken it meanwhile"), std::string::npos) << message;
  EXPECT_EQ(host_.ledger().used(), 0U);
  EXPECT_TRUE(directory_.empty());
}

TEST_F(SessionNvmeTest, NoRoomForTheWindowIsTheHostsError) {
  MemoryTier little(TierKind::kHost, 1000,
                    std::make_unique<HeapArena>(std::make_shared<LiveBlocks>()));
  Reservation taken;
  const auto error = thrown<OutOfMemory>([&] {
    static_cast<void>(make_nvme(plan(), options_, little, executor_, ledger_.get(), 1, taken));
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->tier(), TierKind::kHost);
  EXPECT_EQ(error->available(), 1000U);
  EXPECT_EQ(options_.budgets->nvme()->used(), 0U);
}

}  // namespace
}  // namespace castor::testing
