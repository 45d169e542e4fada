#include "torch/activation_offload.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "io/test_support.h"
#include "store/errors.h"
#include "torch/test_session.h"

namespace castor::testing {
namespace {

constexpr std::int64_t kNumel = 4096;  // 16 KiB

/// Blocks whose saved tensors are charged to a small model.
class ActivationOffloadTest : public ::testing::Test {
 protected:
  void make(TestSettings settings = {}) {
    test_.emplace(TestModel::layers_of(1, 16), std::move(settings));
    offload_ = std::make_shared<ActivationOffload>(test_->shared());
    test_->enter(0);  // from here on this thread's tensors are the model's
  }
  ~ActivationOffloadTest() override {
    if (test_) {
      test_->fail(0);
    }
  }
  static at::Tensor activation(float value, std::int64_t numel = kNumel) {
    return at::full({numel}, value);
  }
  [[nodiscard]] std::size_t device_bytes() const {
    return test_->session().memory().nonmodel()->bytes();
  }
  [[nodiscard]] std::size_t host_bytes() const {
    return test_->session().memory().host_tier()->ledger().used();
  }

  std::optional<TestSession> test_;
  std::shared_ptr<ActivationOffload> offload_;
};

TEST_F(ActivationOffloadTest, WhatABlockSavedLeavesWhenTheNextBlockBeginsAndComesBack) {
  make();
  const std::size_t host = host_bytes();
  const auto pass = offload_->begin();
  auto saved = offload_->save(pass, activation(3));
  EXPECT_EQ(device_bytes(), 4U * kNumel);
  const auto next = offload_->begin();
  EXPECT_EQ(device_bytes(), 0U);
  EXPECT_EQ(host_bytes() - host, 4U * kNumel);
  EXPECT_EQ(offload_->figures().bytes_offloaded, 4U * kNumel);
  const at::Tensor restored = offload_->restore(*saved);
  EXPECT_TRUE(same_bits(restored, activation(3)));
}

TEST_F(ActivationOffloadTest, TheLastBlocksActivationsAreNeverCopied) {
  make();
  const auto pass = offload_->begin();
  const at::Tensor tensor = activation(1);
  const auto saved = offload_->save(pass, tensor);
  EXPECT_EQ(offload_->restore(*saved).const_data_ptr(), tensor.const_data_ptr());
  EXPECT_EQ(offload_->figures().bytes_offloaded, 0U);
}

TEST_F(ActivationOffloadTest, ViewsOfOneStorageLeaveTogether) {
  make();
  const auto pass = offload_->begin();
  std::vector<std::shared_ptr<ActivationOffload::Saved>> saved;
  {
    const at::Tensor all = at::arange(kNumel, at::kFloat);
    saved.push_back(offload_->save(pass, all.narrow(0, 0, 100)));
    saved.push_back(offload_->save(pass, all.view({64, 64}).t()));
  }
  (void)offload_->begin();
  EXPECT_EQ(offload_->figures().bytes_offloaded, 4U * kNumel);
  const at::Tensor first = offload_->restore(*saved[0]);
  const at::Tensor second = offload_->restore(*saved[1]);
  EXPECT_EQ(first.storage().unsafeGetStorageImpl(), second.storage().unsafeGetStorageImpl());
  EXPECT_TRUE(same_bits(first, at::arange(100, at::kFloat)));
  EXPECT_TRUE(same_bits(second, at::arange(kNumel, at::kFloat).view({64, 64}).t()));
}

TEST_F(ActivationOffloadTest, ATensorThatSomebodyHoldsStaysAndIsReadThere) {
  make();
  const auto pass = offload_->begin();
  const at::Tensor held = activation(2);
  const auto saved = offload_->save(pass, held);
  (void)offload_->begin();
  EXPECT_EQ(device_bytes(), 4U * kNumel);
  EXPECT_EQ(offload_->restore(*saved).const_data_ptr(), held.const_data_ptr());
}

TEST_F(ActivationOffloadTest, SmallTensorsAndParametersStay) {
  make();
  const auto pass = offload_->begin();
  const at::Tensor small = activation(1, 1023);
  const auto one = offload_->save(pass, small);
  const auto two = offload_->save(pass, test_->param(0));
  (void)offload_->begin();
  EXPECT_EQ(offload_->figures().bytes_offloaded, 0U);
  EXPECT_EQ(offload_->restore(*one).const_data_ptr(), small.const_data_ptr());
  EXPECT_EQ(offload_->restore(*two).const_data_ptr(), test_->param(0).const_data_ptr());
}

TEST_F(ActivationOffloadTest, AWriteBetweenForwardAndBackwardIsRefused) {
  make();
  const auto pass = offload_->begin();
  const at::Tensor tensor = activation(1);
  const auto saved = offload_->save(pass, tensor);
  const at::Tensor small = activation(1, 8);
  const auto kept = offload_->save(pass, small);
  tensor.add_(1);
  small.add_(1);
  expect_thrown<UsageError>([&] { (void)offload_->restore(*saved); }, "modified by an inplace");
  expect_thrown<UsageError>([&] { (void)offload_->restore(*kept); }, "expected version");
}

TEST_F(ActivationOffloadTest, AFullHostIsRefusedWithItsFigures) {
  std::size_t taken = 0;
  {
    const TestSession alone(TestModel::layers_of(1, 16));
    taken = alone.session().memory().host_tier()->ledger().used();
  }
  make({.host_bytes = taken + 4 * kNumel});
  const auto pass = offload_->begin();
  const auto one = offload_->save(pass, activation(1));
  const auto next = offload_->begin();
  const auto two = offload_->save(next, activation(2));
  expect_out_of_memory([&] { (void)offload_->begin(); }, TierKind::kHost, 4 * kNumel, 0,
                       taken + 4 * kNumel);
  EXPECT_TRUE(same_bits(offload_->restore(*two), activation(2))) << "it has stayed";
}

TEST_F(ActivationOffloadTest, HostBuffersOfDroppedGraphsServeTheNextStep) {
  make();
  std::size_t host = 0;
  for (int step = 0; step < 3; ++step) {
    const auto pass = offload_->begin();
    const auto saved = offload_->save(pass, activation(1));
    (void)offload_->begin();
    if (step == 0) {
      host = host_bytes();
    }
    EXPECT_EQ(host_bytes(), host);
    EXPECT_EQ(offload_->figures().ready_host_bytes, 0U);
  }
  EXPECT_EQ(offload_->figures().ready_host_bytes, 4U * kNumel);
}

TEST_F(ActivationOffloadTest, SavedTensorsKeepTheSessionAlive) {
  make();
  const auto pass = offload_->begin();
  auto saved = offload_->save(pass, activation(4));
  (void)offload_->begin();
  test_->fail(0);
  const std::weak_ptr<Session> session = test_->shared();
  test_.reset();
  offload_.reset();
  EXPECT_FALSE(session.expired());
  saved.reset();
  EXPECT_TRUE(session.expired());
}

TEST_F(ActivationOffloadTest, CopiesThatRunBesideComputeLeaveOneBlockLater) {
  make({.link_bytes_per_second = std::uint64_t{1} << 32});
  const auto pass = offload_->begin();
  const auto saved = offload_->save(pass, activation(5));
  const auto second = offload_->begin();
  EXPECT_EQ(device_bytes(), 4U * kNumel) << "on its way";
  const auto third = offload_->begin();
  EXPECT_EQ(device_bytes(), 0U);
  EXPECT_TRUE(same_bits(offload_->restore(*saved), activation(5)));
}

TEST_F(ActivationOffloadTest, ActivationsWithoutRoomOnTheHostGoToNvme) {
  const castor::test::TempDirectory directory;
  TestSettings settings{.host_bytes = std::size_t{24} << 20,
                        .nvme_directory = directory.string(),
                        .nvme_bytes = std::size_t{64} << 20,
                        .nvme_holds_activations = true};
  settings.device_bytes = std::size_t{128} << 20;
  make(settings);
  const std::size_t pages = test_->session().memory().num_activation_pages();
  ASSERT_GT(pages, 0U);
  const std::int64_t numel = std::int64_t{1} << 20;  // 4 MiB
  std::vector<std::shared_ptr<ActivationOffload::Saved>> saved;
  const std::size_t ready = offload_->figures().ready_nvme_bytes;
  for (int i = 0; i < 8; ++i) {
    const auto pass = offload_->begin();
    saved.push_back(offload_->save(pass, activation(static_cast<float>(i), numel)));
  }
  (void)offload_->begin();
  EXPECT_LT(offload_->figures().ready_nvme_bytes, ready);
  for (int i = 7; i >= 0; --i) {
    EXPECT_TRUE(same_bits(offload_->restore(*saved[static_cast<std::size_t>(i)]),
                          activation(static_cast<float>(i), numel)))
        << i;
    saved.pop_back();
  }
  EXPECT_EQ(offload_->figures().ready_nvme_bytes, ready);
  test_->fail(0);
  offload_.reset();
  test_.reset();
}

}  // namespace
}  // namespace castor::testing
