#include "torch/counting_allocator.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "store/charged_account.h"
#include "torch/test_session.h"
#include "torch/torch_error.h"

namespace castor::testing {
namespace {

constexpr std::size_t kBudget = 1 << 20;

/// An account of a device of 1 MiB, which this thread's allocations are charged to.
class CountingAllocatorTest : public ::testing::Test {
 protected:
  CountingAllocatorTest()
      : budget_(std::make_shared<Budget>(TierKind::kDevice, kBudget)),
        account_(std::make_shared<NonModelMemory>(std::make_shared<Ledger>(budget_, "model"))) {
    install_counting_allocator();
    charge_allocations_to(account_);
  }
  ~CountingAllocatorTest() override { charge_allocations_to(nullptr); }

  std::shared_ptr<Budget> budget_;
  std::shared_ptr<NonModelMemory> account_;
};

/// A runtime whose every chunk is evicted by the first demand.
class OneEviction final : public Reclaimer {
 public:
  explicit OneEviction(Ledger& ledger) : ledger_(ledger), taken_(ledger.reserve(kBudget / 2, "")) {}
  void reclaim(std::size_t bytes) override {
    taken_ = Reservation();
    if (ledger_.available() < bytes) {
      throw ledger_.out_of_memory(bytes, "raise device_memory");
    }
  }

 private:
  Ledger& ledger_;
  Reservation taken_;
};

TEST_F(CountingAllocatorTest, ATensorIsChargedFromItsAllocationToItsEnd) {
  at::Tensor tensor = at::empty({1000}, at::kByte);
  EXPECT_EQ(account_->bytes(), 1000U);
  at::Tensor view = tensor.view({10, 100});
  EXPECT_EQ(account_->bytes(), 1000U);
  tensor.reset();
  EXPECT_EQ(account_->bytes(), 1000U);
  view.reset();
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST_F(CountingAllocatorTest, AllocationsOfOtherThreadsAreTheirOwn) {
  at::Tensor tensor;
  std::thread([&] { tensor = at::empty({1000}, at::kByte); }).join();
  EXPECT_EQ(account_->bytes(), 0U);
  tensor.reset();
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST_F(CountingAllocatorTest, AnotherThreadMayFreeWhatWasCharged) {
  at::Tensor tensor = at::empty({1000}, at::kByte);
  std::thread([moved = std::move(tensor)]() mutable { moved.reset(); }).join();
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST_F(CountingAllocatorTest, NothingIsChargedInAnUnchargedScope) {
  at::Tensor tensor;
  {
    const Uncharged uncharged;
    tensor = at::empty({1000}, at::kByte);
  }
  EXPECT_EQ(account_->bytes(), 0U);
  EXPECT_EQ(charged_account(), account_);
}

TEST_F(CountingAllocatorTest, AnAllocationThatSomebodyElsePaysForIsChargedNoMore) {
  const at::Tensor tensor = at::empty({1000}, at::kByte);
  stop_charging_for(tensor.storage().mutable_data());
  EXPECT_EQ(account_->bytes(), 0U);
  stop_charging_for(tensor.storage().mutable_data());
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST_F(CountingAllocatorTest, AnAllocationBeyondTheBudgetIsRefusedAndChargesNothing) {
  EXPECT_THROW((void)at::empty({kBudget + 1}, at::kByte), TorchError);
  EXPECT_EQ(last_out_of_memory().requested, kBudget + 1);
  EXPECT_EQ(last_out_of_memory().budget, kBudget);
  EXPECT_EQ(account_->bytes(), 0U);
  const at::Tensor all = at::empty({kBudget}, at::kByte);
  EXPECT_EQ(account_->bytes(), kBudget);
}

TEST_F(CountingAllocatorTest, AnAllocationThatDoesNotFitEvictsChunksFirst) {
  Ledger chunks(budget_, "chunks");
  OneEviction runtime(chunks);
  account_->add_reclaimer(&runtime);
  {
    const at::Tensor tensor = at::empty({kBudget * 3 / 4}, at::kByte);
    EXPECT_EQ(budget_->used(), kBudget * 3 / 4);
  }
  account_->remove_reclaimer(&runtime);
}

TEST_F(CountingAllocatorTest, TheAccountOutlivesItsModelForTheTensorsThatAreLeft) {
  at::Tensor tensor = at::empty({1000}, at::kByte);
  charge_allocations_to(nullptr);
  const std::weak_ptr<NonModelMemory> weak = account_;
  account_.reset();
  EXPECT_FALSE(weak.expired());
  EXPECT_EQ(budget_->used(), 1000U);
  tensor.reset();
  EXPECT_TRUE(weak.expired());
  EXPECT_EQ(budget_->used(), 0U);
}

TEST_F(CountingAllocatorTest, ThousandsOfAllocationsInAnyOrderComeToNothing) {
  std::vector<at::Tensor> tensors(3000);
  for (std::size_t i = 0; i < 9000; ++i) {
    tensors[i * 7919 % tensors.size()] =
        at::empty({static_cast<std::int64_t>(i % 64 + 1)}, at::kByte);
  }
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += tensor.defined() ? tensor.nbytes() : 0;
  }
  EXPECT_EQ(account_->bytes(), bytes);
  tensors.clear();
  EXPECT_EQ(account_->bytes(), 0U);
}

TEST(SessionChargesTest, APassIsChargedUntilItsEndAndNoLonger) {
  const TestSession test(TestModel::layers_of(2, 16));
  const at::Tensor input = batch(16, 1);
  EXPECT_EQ(test.session().memory().nonmodel()->bytes(), 0U);
  at::Tensor output = test.forward(input);
  const std::size_t activations = test.session().memory().nonmodel()->bytes();
  EXPECT_GT(activations, 0U);
  const at::Tensor loss = loss_of(output);
  EXPECT_GT(test.session().memory().nonmodel()->bytes(), activations) << "the loss is the model's";
  loss.backward();
  const std::size_t after = test.session().memory().nonmodel()->bytes();
  const at::Tensor data = batch(16, 2);
  EXPECT_EQ(test.session().memory().nonmodel()->bytes(), after)
      << "what follows backward is the thread's own";
  test.step();
  EXPECT_EQ(charged_account(), nullptr);
}

TEST(SessionChargesTest, AnInferenceIsChargedUntilItsModelReturns) {
  const TestSession test(TestModel::layers_of(2, 16));
  const at::NoGradGuard no_grad;
  const at::Tensor input = batch(16, 1);
  const at::Tensor output = test.forward(input);
  EXPECT_EQ(test.session().memory().nonmodel()->bytes(), output.nbytes());
  EXPECT_EQ(charged_account(), nullptr);
}

TEST(SessionChargesTest, ActivationsThatDoNotFitRaiseAndTheModelGoesOn) {
  const TestSession test(TestModel::layers_of(2, 16), {.device_bytes = 16 << 10});
  EXPECT_THROW((void)test.forward(batch(16, 1, at::kFloat, 4096)), TorchError);
  EXPECT_EQ(charged_account(), nullptr);
  Reference reference(TestModel::layers_of(2, 16), adam(), adam_options());
  test.run(batch(16, 2));
  reference.run(batch(16, 2));
  test.step();
  reference.step();
  expect_same_bits(test.values(), reference.model().params);
}

}  // namespace
}  // namespace castor::testing
