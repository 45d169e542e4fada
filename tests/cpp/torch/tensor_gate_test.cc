#include "torch/tensor_gate.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "torch/chunk_storages.h"
#include "torch/test_session.h"

namespace castor::testing {
namespace {

using Guard = TensorGate::Guard;

/// A gate that notes what it calls, and tensors over memory that others own.
class TensorGateTest : public ::testing::Test {
 protected:
  TensorGateTest() {
    for (std::vector<float>& memory : memory_) {
      memory.assign(8, 1.0F);
      tensors_.push_back(over(memory));
    }
  }
  static at::Tensor over(std::vector<float>& memory) {
    const c10::Storage storage = empty_storage(memory.size() * sizeof(float));
    point(storage, reinterpret_cast<std::byte*>(memory.data()));
    return tensor_over(storage, at::kFloat, 0,
                       {.sizes = {static_cast<std::int64_t>(memory.size())}, .strides = {1}});
  }
  void make(bool with_visits = false) {
    TensorGate::Visit visit;
    if (with_visits) {
      visit = [this](std::span<const TensorGate::Use> uses) {
        for (const TensorGate::Use& use : uses) {
          visits_.emplace_back(use.group, use.writes);
        }
        ++under_way_;
        return std::shared_ptr<void>(
            this, [](void* self) { --static_cast<TensorGateTest*>(self)->under_way_; });
      };
    }
    gate_ = TensorGate::create(
        2,
        [this](std::size_t group) {
          if (fails_) {
            throw Error("the update failed");
          }
          settled_.push_back(group);
        },
        {.reads = [this](std::size_t group) { return read_.contains(group); },
         .await =
             [this](std::size_t group) {
               if (read_.erase(group) > 0) {
                 awaited_.push_back(group);
               }
             }},
        std::move(visit));
  }
  void watch() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      gate_->watch(i, tensors_[i]);
    }
  }

  std::vector<float> memory_[2];
  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> settled_;
  std::vector<std::size_t> awaited_;
  std::set<std::size_t> read_;
  std::vector<std::pair<std::size_t, bool>> visits_;
  int under_way_ = 0;
  bool fails_ = false;
  std::shared_ptr<TensorGate> gate_;
};

TEST_F(TensorGateTest, AnOperatorOnAClosedGroupSettlesThatGroupOnce) {
  make();
  watch();
  gate_->close(0);
  gate_->close(1);
  EXPECT_TRUE(is_gated(tensors_[0]));
  EXPECT_EQ(tensors_[0].sum().item<float>(), 8.0F);
  EXPECT_EQ(settled_, std::vector<std::size_t>{0});
  EXPECT_FALSE(is_gated(tensors_[0]));
  EXPECT_TRUE(is_gated(tensors_[1]));
  (void)tensors_[0].sum();
  EXPECT_EQ(settled_.size(), 1U);
}

TEST_F(TensorGateTest, OperatorsOnOpenGroupsSettleNothing) {
  make();
  watch();
  (void)tensors_[0].add(tensors_[1]);
  gate_->close(0);
  gate_->open(0);
  (void)tensors_[0].add(tensors_[1]);
  EXPECT_TRUE(settled_.empty());
}

TEST_F(TensorGateTest, OneOperatorSettlesTheGroupsOfAllItsTensors) {
  make();
  watch();
  gate_->close(0);
  gate_->close(1);
  (void)at::cat({tensors_[1], tensors_[0]});
  EXPECT_EQ(settled_, (std::vector<std::size_t>{1, 0}));
}

TEST_F(TensorGateTest, ViewsAndAliasesOfAClosedTensorAreHeldBack) {
  make();
  watch();
  gate_->close(0);
  const at::Tensor view = tensors_[0].view({2, 4});
  EXPECT_EQ(settled_, std::vector<std::size_t>{0}) << "making a view is an operator on the tensor";
  gate_->close(0);
  const at::Tensor detached = tensors_[0].variable_data();
  EXPECT_EQ(settled_, (std::vector<std::size_t>{0, 0})) << "torch pickles a parameter by .data";
  (void)view.sum();
  EXPECT_EQ(settled_.size(), 2U);
}

TEST_F(TensorGateTest, TorchThrowsWhereTheAddressOfAClosedTensorIsAskedFor) {
  make();
  watch();
  gate_->close(0);
  EXPECT_THROW((void)tensors_[0].storage().data(), c10::Error);
  gate_->pass(0);
  EXPECT_EQ(tensors_[0].const_data_ptr(), memory_[0].data());
}

TEST_F(TensorGateTest, ThreadsThatAskForAddressesWhileGroupsCloseAndOpenAreToldOfTheUpdate) {
  make();
  watch();
  std::atomic<bool> over = false;
  std::atomic<int> num_told = 0;
  std::atomic<int> num_other = 0;
  {
    std::vector<std::jthread> askers;
    for (int i = 0; i < 2; ++i) {
      askers.emplace_back([&] {
        while (!over) {
          try {
            (void)tensors_[0].storage().data();
          } catch (const c10::Error& error) {
            const std::string_view message = error.what_without_backtrace();
            (message.starts_with("the optimizer is still updating") ? num_told : num_other) += 1;
          }
        }
      });
    }
    for (int round = 0; round < 20'000 || num_told < 100; ++round) {
      gate_->close(0);
      gate_->open(0);
    }
    over = true;
  }
  EXPECT_EQ(num_other, 0);
}

TEST_F(TensorGateTest, PassAllSettlesEveryClosedGroup) {
  make();
  watch();
  gate_->close(1);
  gate_->pass_all();
  EXPECT_EQ(settled_, std::vector<std::size_t>{1});
  gate_->close(0);
  gate_->close(1);
  gate_->pass_all();
  EXPECT_EQ(settled_, (std::vector<std::size_t>{1, 0, 1}));
}

TEST_F(TensorGateTest, AFailedUpdateFailsTheOperatorAndLeavesTheGroupClosed) {
  make();
  watch();
  gate_->close(0);
  fails_ = true;
  try {
    (void)tensors_[0].sum();
    ADD_FAILURE() << "the operator ran";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("the update failed"), std::string::npos);
  }
  EXPECT_TRUE(is_gated(tensors_[0]));
  fails_ = false;
  (void)tensors_[0].sum();
  EXPECT_EQ(settled_, std::vector<std::size_t>{0});
}

TEST_F(TensorGateTest, AReaderHoldsBackOperatorsThatWrite) {
  make();
  watch();
  read_ = {0};
  gate_->share(0);
  (void)tensors_[0].sum();
  EXPECT_TRUE(awaited_.empty());
  tensors_[0].add_(1);
  EXPECT_EQ(awaited_, std::vector<std::size_t>{0});
  EXPECT_FALSE(is_gated(tensors_[0])) << "the reader is over";
}

TEST_F(TensorGateTest, AReadersEndIsNoticedByTheNextOperator) {
  make();
  watch();
  read_ = {0};
  gate_->share(0);
  read_.clear();
  (void)tensors_[0].sum();
  EXPECT_FALSE(is_gated(tensors_[0]));
  EXPECT_TRUE(awaited_.empty());
}

TEST_F(TensorGateTest, OperatorsOnGuardedGroupsRunWithinAVisit) {
  make(/*with_visits=*/true);
  gate_->guard(0, Guard::kHeld);
  watch();
  (void)tensors_[0].sum();
  tensors_[0].add_(tensors_[1]);
  EXPECT_EQ(visits_, (std::vector<std::pair<std::size_t, bool>>{{0, false}, {0, true}}));
  EXPECT_EQ(under_way_, 0);
  EXPECT_TRUE(is_gated(tensors_[0])) << "for good";
}

TEST_F(TensorGateTest, ATensorThatIsReadAndWrittenIsVisitedOnceToBeWritten) {
  make(/*with_visits=*/true);
  gate_->guard(0, Guard::kHeld);
  watch();
  tensors_[0].mul_(tensors_[0]);
  EXPECT_EQ(visits_, (std::vector<std::pair<std::size_t, bool>>{{0, true}}));
}

TEST_F(TensorGateTest, ListsOfBroughtTensorsAreVisitedOneByOne) {
  make(/*with_visits=*/true);
  gate_->guard(0, Guard::kBrought);
  gate_->guard(1, Guard::kBrought);
  watch();
  const auto norms = at::_foreach_norm(tensors_);
  EXPECT_EQ(visits_, (std::vector<std::pair<std::size_t, bool>>{{0, false}, {1, false}}));
  EXPECT_EQ(norms.size(), 2U);
}

TEST_F(TensorGateTest, ViewsOfGuardedTensorsAreVisitedToo) {
  make(/*with_visits=*/true);
  gate_->guard(0, Guard::kHeld);
  watch();
  const at::Tensor row = tensors_[0].slice(0, 0, 2);
  visits_.clear();
  row.fill_(3);
  EXPECT_EQ(visits_, (std::vector<std::pair<std::size_t, bool>>{{0, true}}));
  EXPECT_EQ(memory_[0][1], 3.0F);
}

TEST_F(TensorGateTest, ATensorThatIsNoLongerWatchedIsFree) {
  make();
  watch();
  gate_->close(0);
  gate_->unwatch(0, tensors_[0]);
  EXPECT_EQ(settled_, std::vector<std::size_t>{0}) << "it opens the group";
  gate_->close(0);
  (void)tensors_[0].sum();
  EXPECT_EQ(settled_.size(), 1U);
}

TEST_F(TensorGateTest, ATensorThatReplacesAnotherIsHeldBackInItsPlace) {
  make();
  const std::size_t position = gate_->watch(0, tensors_[0]);
  gate_->close(0);
  gate_->replace(0, position, tensors_[1]);
  (void)tensors_[0].sum();
  EXPECT_TRUE(settled_.empty());
  (void)tensors_[1].sum();
  EXPECT_EQ(settled_, std::vector<std::size_t>{0});
}

TEST_F(TensorGateTest, TensorsAreFreeWhenTheGateHasGone) {
  make();
  watch();
  gate_->close(0);
  gate_.reset();
  EXPECT_FALSE(is_gated(tensors_[0]));
  EXPECT_EQ(tensors_[0].sum().item<float>(), 8.0F);
  EXPECT_EQ(tensors_[0].const_data_ptr(), memory_[0].data());
}

TEST_F(TensorGateTest, ReadableCopiesWhatIsGated) {
  make();
  watch();
  EXPECT_TRUE(readable(tensors_[0]).is_same(tensors_[0]));
  gate_->close(0);
  const at::Tensor copy = readable(tensors_[0]);
  EXPECT_NE(copy.const_data_ptr(), memory_[0].data());
  EXPECT_EQ(settled_, std::vector<std::size_t>{0});
}

TEST_F(TensorGateTest, EveryOperatorOfAHammerRunsBehindTheSettlementOfItsGroup) {
  constexpr int kRounds = 500;
  std::atomic<int> due = 0;
  std::atomic<int> closed = 0;   // the last round whose group was closed
  std::atomic<int> settled = 0;  // the last round that was settled
  std::atomic<int> num_early = 0;
  const auto gate =
      TensorGate::create(1, [&](std::size_t) { settled = due.load(); },
                         {.reads = [](std::size_t) { return false; }, .await = [](std::size_t) {}});
  gate->watch(0, tensors_[0]);
  {
    std::vector<std::jthread> operators;
    for (int i = 0; i < 3; ++i) {
      operators.emplace_back([&] {
        for (int least = 0; least < kRounds;) {
          least = closed.load();
          (void)tensors_[0].view({2, 4});
          num_early += settled.load() < least ? 1 : 0;
        }
      });
    }
    for (int round = 1; round <= kRounds; ++round) {
      due = round;
      gate->close(0);
      closed = round;
    }
  }
  EXPECT_EQ(num_early, 0);
}

// The gate in a session: updates run beside what follows the step.

TEST(SessionGateTest, AnOperatorOnAParameterWaitsForItsUpdate) {
  const TestModel model = TestModel::layers_of(6, 64);
  Reference reference(model.copy(), adam(), adam_options());
  const TestSession test(model, {.overlap = Overlap::kForward, .chunk_bytes = 1 << 14});
  test.run(batch(64, 1));
  reference.run(batch(64, 1));
  test.step();
  reference.step();
  for (std::size_t i = 12; i-- > 0;) {  // the last first: nothing has waited for it
    EXPECT_TRUE(same_bits(test.param(i).detach().clone(), reference.model().params[i]));
  }
}

TEST(SessionGateTest, AnOperatorOnAStateWaitsForTheUpdate) {
  const TestModel model = TestModel::layers_of(4, 64);
  Reference reference(model.copy(), adam(), adam_options());
  const TestSession test(model, {.overlap = Overlap::kForward, .chunk_bytes = 1 << 14});
  const at::Tensor moment = test.session().states(param_id(7))[0];
  test.run(batch(64, 1));
  reference.run(batch(64, 1));
  test.step();
  reference.step();
  EXPECT_TRUE(same_bits(moment.clone().reshape({-1}), reference.state(7, 0)));
}

TEST(SessionGateTest, AWriteOfAParameterComesAfterItsUpdate) {
  const TestModel model = TestModel::layers_of(4, 64);
  const TestSession test(model, {.overlap = Overlap::kForward, .chunk_bytes = 1 << 14});
  test.run(batch(64, 1));
  test.step();
  {
    const at::NoGradGuard no_grad;
    test.param(6).zero_();
  }
  test.session().await_updates();
  EXPECT_TRUE(same_bits(test.param(6), at::zeros({64, 64})));
}

TEST(SessionGateTest, AGradientThatIsWrittenWhileItsUpdateRunsWaitsForIt) {
  const TestModel model = TestModel::layers_of(4, 64);
  Reference reference(model.copy(), adam(), adam_options());
  const TestSession test(model, {.overlap = Overlap::kForward, .chunk_bytes = 1 << 14});
  test.run(batch(64, 1));
  reference.run(batch(64, 1));
  test.step_keeping_gradients();
  reference.step();
  for (const at::Tensor& param : test.model().params) {
    param.mutable_grad().zero_();  // zero_grad(set_to_none=False)
  }
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionGateTest, AwaitUpdatesOpensTheWayToAddresses) {
  const TestSession test(TestModel::layers_of(4, 64),
                         {.overlap = Overlap::kForward, .chunk_bytes = 1 << 14});
  test.run(batch(64, 1));
  test.step();
  test.session().settle(param_id(3));
  EXPECT_NO_THROW((void)test.param(3).const_data_ptr());
  test.session().move_to_host();
}

}  // namespace
}  // namespace castor::testing
