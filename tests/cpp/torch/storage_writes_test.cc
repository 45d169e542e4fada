#include "torch/storage_writes.h"

#include <ATen/ops/_fused_adam.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "torch/chunk_storages.h"
#include "torch/test_session.h"
#include "torch/uses.h"

namespace castor::testing {
namespace {

/// One tensor over a storage whose writes are watched.
class StorageWritesTest : public ::testing::Test {
 protected:
  StorageWritesTest() : memory_(16, 1.0F), storage_(empty_storage(64)) {
    point(storage_, reinterpret_cast<std::byte*>(memory_.data()));
    tensor_ = tensor_over(storage_, at::kFloat, 0, {.sizes = {16}, .strides = {1}});
    writes_.emplace(std::span(&storage_, 1));
    writes_->follow(tensor_);
    writes_->snapshot();
  }
  [[nodiscard]] bool written() const { return writes_->since_snapshot(); }

  std::vector<float> memory_;
  c10::Storage storage_;
  at::Tensor tensor_;
  std::optional<StorageWrites> writes_;
};

TEST_F(StorageWritesTest, OperatorsThatReadAreNoWrites) {
  (void)tensor_.sum();
  (void)tensor_.add(tensor_);
  (void)tensor_.view({4, 4});
  EXPECT_FALSE(written());
}

TEST_F(StorageWritesTest, AnInPlaceOperatorIsSeenUntilTheNextSnapshot) {
  tensor_.add_(1);
  EXPECT_TRUE(written());
  writes_->snapshot();
  EXPECT_FALSE(written());
}

TEST_F(StorageWritesTest, AWriteThroughAViewOrADetachedAliasIsSeen) {
  tensor_.view({4, 4}).select(0, 1).fill_(2);
  EXPECT_TRUE(written());
  writes_->snapshot();
  tensor_.detach().mul_(2);
  EXPECT_TRUE(written());
}

TEST_F(StorageWritesTest, AWriteThroughDataIsSeenThoughItHasACounterOfItsOwn) {
  const at::Tensor data = tensor_.variable_data();
  EXPECT_FALSE(written());
  data.add_(1);
  EXPECT_TRUE(written());
}

TEST_F(StorageWritesTest, AWriteOfATensorThatHasGoneIsRemembered) {
  tensor_.variable_data().add_(1);
  EXPECT_TRUE(written());
}

TEST_F(StorageWritesTest, ATensorThatIsGivenTheMemoryIsFollowed) {
  at::Tensor other = at::zeros({16});
  other.set_data(tensor_);
  EXPECT_FALSE(written());
  other.zero_();
  EXPECT_TRUE(written());
  writes_->snapshot();
  at::Tensor third = at::zeros({16});
  third.set_(tensor_);
  writes_->snapshot();
  third.fill_(3);
  EXPECT_TRUE(written());
}

TEST_F(StorageWritesTest, AnOperatorThatCountsNoWriteIsSeenByItsSchema) {
  const at::Tensor grad = at::ones({16});
  const at::Tensor exp_avg = at::zeros({16});
  const at::Tensor exp_avg_sq = at::zeros({16});
  const std::vector<at::Tensor> steps{at::ones({})};
  const std::vector<at::Tensor> params{tensor_};
  const std::vector<at::Tensor> grads{grad};
  const std::vector<at::Tensor> first{exp_avg};
  const std::vector<at::Tensor> second{exp_avg_sq};
  at::_fused_adam_(params, grads, first, second, {}, steps, 0.1, 0.9, 0.99, 0.0, 1e-8, false,
                   false);
  EXPECT_TRUE(written());
}

TEST_F(StorageWritesTest, NoteRecordsAWriteThatNothingElseReports) {
  writes_->note();
  EXPECT_TRUE(written());
  writes_->snapshot();
  EXPECT_FALSE(written());
}

TEST_F(StorageWritesTest, ADistrustedStorageCountsAsWrittenWhileOthersAreOverIt) {
  at::Tensor unknown = tensor_over(storage_, at::kFloat, 0, {.sizes = {16}, .strides = {1}});
  writes_->distrust(storage_, uses_of(storage_) - 1);
  EXPECT_TRUE(written());
  writes_->snapshot();
  EXPECT_TRUE(written());
  unknown.reset();
  writes_->snapshot();
  EXPECT_FALSE(written());
}

TEST_F(StorageWritesTest, AStorageThatReplacesAnotherIsWatchedInItsPlace) {
  std::vector<float> memory(16, 2.0F);
  const c10::Storage other = empty_storage(64);
  point(other, reinterpret_cast<std::byte*>(memory.data()));
  EXPECT_TRUE(is_watched(storage_));
  writes_->replace(storage_, other);
  EXPECT_FALSE(is_watched(storage_));
  EXPECT_TRUE(is_watched(other));
  const at::Tensor over_other = tensor_over(other, at::kFloat, 0, {.sizes = {16}, .strides = {1}});
  over_other.variable_data().zero_();
  EXPECT_TRUE(written());
}

TEST_F(StorageWritesTest, NothingIsWatchedAfterTheEnd) {
  writes_.reset();
  EXPECT_FALSE(is_watched(storage_));
  EXPECT_NO_THROW(tensor_.variable_data().zero_());
}

TEST_F(StorageWritesTest, AResizableStorageIsRefused) {
  const c10::Storage resizable = at::zeros({4}).storage();
  EXPECT_THROW(StorageWrites(std::span(&resizable, 1)), InvalidArgument);
}

TEST_F(StorageWritesTest, GivingATensorOtherMemoryIsCounted) {
  const std::uint64_t before = num_given_memory();
  tensor_.set_data(at::zeros({16}));
  EXPECT_EQ(num_given_memory(), before + 1);
  at::Tensor ordinary = at::zeros({3});
  ordinary.set_data(at::zeros({3}));
  EXPECT_EQ(num_given_memory(), before + 1) << "an ordinary tensor's memory is of no interest";
}

TEST_F(StorageWritesTest, ATensorOfInferenceModeCountsAsWrittenWhileItLives) {
  {
    const c10::InferenceMode inference;
    at::Tensor made = at::zeros({16});
    made.set_data(tensor_);
    EXPECT_TRUE(written());
  }
  writes_->snapshot();
  EXPECT_FALSE(written());
}

}  // namespace
}  // namespace castor::testing
