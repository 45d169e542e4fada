#include "store/shared_budgets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "store/errors.h"
#include "store/fake_device.h"

namespace castor::testing {
namespace {

class FakeAccount final : public DeviceAccount {
 public:
  void make_room(std::size_t /*bytes*/) override {}
  [[nodiscard]] bool evict_refused(std::size_t /*bytes*/) override { return false; }
  void allocated(std::size_t /*bytes*/) noexcept override {}
  void freed(std::size_t /*bytes*/) noexcept override {}
};

TEST(SharedBudgetsTest, EachTierHasItsBudget) {
  const SharedBudgets budgets(100, 200, 300);
  EXPECT_EQ(budgets.device()->bytes(), 100U);
  EXPECT_EQ(budgets.device()->tier(), TierKind::kDevice);
  EXPECT_EQ(budgets.host()->bytes(), 200U);
  EXPECT_EQ(budgets.host()->tier(), TierKind::kHost);
  EXPECT_EQ(budgets.nvme()->bytes(), 300U);
  EXPECT_EQ(budgets.nvme()->tier(), TierKind::kNvme);
  EXPECT_NE(budgets.runtimes(), nullptr);
}

TEST(SharedBudgetsTest, ATierWithoutBytesIsRefused) {
  EXPECT_THROW(SharedBudgets(0, 1, 1), InvalidArgument);
  EXPECT_THROW(SharedBudgets(1, 0, 1), InvalidArgument);
  EXPECT_THROW(SharedBudgets(1, 1, 0), InvalidArgument);
}

TEST(SharedBudgetsTest, CommunicatorsTakeDeviceMemoryUntilTheyGo) {
  SharedBudgets budgets(100, 1, 1);
  {
    const Reservation all = budgets.take_communicators(100);
    EXPECT_EQ(all.bytes(), 100U);
    EXPECT_EQ(budgets.device()->available(), 0U);
    const Reservation none = budgets.take_communicators(0);  // fits even then
    EXPECT_EQ(none.bytes(), 0U);
  }
  EXPECT_EQ(budgets.device()->used(), 0U);
}

TEST(SharedBudgetsTest, CommunicatorsThatDoNotFitAreRefusedWithTheirFigures) {
  SharedBudgets budgets(100, 1, 1);
  const Reservation some = budgets.take_communicators(60);
  expect_out_of_memory([&] { static_cast<void>(budgets.take_communicators(41)); },
                       TierKind::kDevice, 41, 40, 100);
  EXPECT_EQ(budgets.device()->used(), 60U);
}

TEST(SharedBudgetsTest, ModelsAreNumberedFromOneOn) {
  SharedBudgets budgets(1, 1, 1);
  EXPECT_EQ(budgets.num_models(), 0U);
  const SharedBudgets::Place first(budgets, "Net");
  const SharedBudgets::Place second(budgets, "Net");
  EXPECT_EQ(first.number(), 1U);
  EXPECT_EQ(second.number(), 2U);
  EXPECT_EQ(first.owner(), "Net (model 1 of its plugin)");
  EXPECT_EQ(second.owner(), "Net (model 2 of its plugin)");
  EXPECT_EQ(budgets.num_models(), 2U);
}

TEST(SharedBudgetsTest, ANumberIsGivenAgainWhenItsModelIsGone) {
  SharedBudgets budgets(1, 1, 1);
  std::optional<SharedBudgets::Place> first(std::in_place, budgets, "a");
  const SharedBudgets::Place second(budgets, "b");
  first.reset();
  EXPECT_EQ(budgets.num_models(), 1U);
  const SharedBudgets::Place third(budgets, "c");
  EXPECT_EQ(third.number(), 1U);
  const SharedBudgets::Place fourth(budgets, "d");
  EXPECT_EQ(fourth.number(), 3U);
}

TEST(SharedBudgetsTest, ThreadsGetDifferentNumbers) {
  SharedBudgets budgets(1, 1, 1);
  std::mutex mutex;
  std::vector<std::unique_ptr<SharedBudgets::Place>> places;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < 25; ++round) {
          const SharedBudgets::Place passing(budgets, "passing");
          auto place = std::make_unique<SharedBudgets::Place>(budgets, "Net");
          const std::lock_guard lock(mutex);
          places.push_back(std::move(place));
        }
      });
    }
  }
  std::vector<std::size_t> numbers;
  for (const auto& place : places) {
    numbers.push_back(place->number());
  }
  std::ranges::sort(numbers);
  EXPECT_EQ(std::ranges::adjacent_find(numbers), numbers.end());
  EXPECT_LE(numbers.back(), 104U);  // the passing ones have given theirs back
  EXPECT_EQ(budgets.num_models(), 100U);
}

TEST(SharedBudgetsTest, TheFirstAccountAloneFollowsTheAllocator) {
  SharedBudgets budgets(1, 1, 1);
  FakeDevice device;
  const auto first = std::make_shared<FakeAccount>();
  const auto second = std::make_shared<FakeAccount>();
  budgets.follow_torch(device, first);
  budgets.follow_torch(device, second);
  EXPECT_EQ(device.num_followed(), 1U);
  EXPECT_EQ(second.use_count(), 1);
}

TEST(SharedBudgetsTest, AnAccountThatCouldNotFollowLeavesThePlaceToTheNext) {
  SharedBudgets budgets(1, 1, 1);
  FakeDevice device;
  device.fail_next();
  EXPECT_THROW(budgets.follow_torch(device, std::make_shared<FakeAccount>()), InjectedFailure);
  EXPECT_EQ(device.num_followed(), 0U);
  budgets.follow_torch(device, std::make_shared<FakeAccount>());
  EXPECT_EQ(device.num_followed(), 1U);
}

TEST(SharedBudgetsTest, TensorsOfTorchCountOnTheDevicesBudget) {
  const SharedBudgets budgets(100, 1, 1);
  budgets.tensors_of_torch()->allocate(30);
  EXPECT_EQ(budgets.device()->used(), 30U);
  budgets.tensors_of_torch()->free(30);
  EXPECT_EQ(budgets.device()->used(), 0U);
}

}  // namespace
}  // namespace castor::testing
