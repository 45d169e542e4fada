// Passes over a simulated machine, with an autograd whose passes the test ends. Turns of several
// threads: pass_turn_test.cc.

#include "store/passes.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/machine.h"
#include "store/charged_account.h"
#include "store/small_model.h"

namespace castor::testing {
namespace {

/// Autograd of a process whose only thread the test runs on.
struct FakeAutograd {
  PassTurn::Task task = PassTurn::kNoTask;
  bool records = true;
  std::vector<std::function<void()>> ends;

  void end_pass() {
    const auto reached = std::exchange(ends, {});
    for (const auto& end : reached) {
      end();
    }
    task = PassTurn::kNoTask;
  }
  void fail_pass() {
    ends.clear();
    task = PassTurn::kNoTask;
  }
};

class AutogradOfTest final : public Autograd {
 public:
  explicit AutogradOfTest(FakeAutograd& state) : state_(state) {}
  [[nodiscard]] PassTurn::Caller caller() const override { return {.task = state_.task}; }
  [[nodiscard]] bool records() const override { return state_.records; }
  void at_end(std::function<void()> reached) const override {
    state_.ends.push_back(std::move(reached));
  }

 private:
  FakeAutograd& state_;
};

class StorePassesTest : public ::testing::Test {
 protected:
  ~StorePassesTest() override { charge_allocations_to(nullptr); }
  [[nodiscard]] bool charged() const { return charged_account() == machine_.nonmodel; }

  SimulatedMachine machine_{SmallModel::row(1, 16).layout(64), 1 << 12};
  FakeAutograd autograd_;
  std::shared_ptr<Passes> passes_ = std::make_shared<Passes>(
      *machine_.runtime, machine_.nonmodel, std::make_unique<AutogradOfTest>(autograd_));
};

TEST_F(StorePassesTest, ATrainingThreadIsChargedFromForwardToTheEndOfBackward) {
  EXPECT_FALSE(charged());
  (void)passes_->begin_forward();
  EXPECT_TRUE(charged());
  EXPECT_TRUE(passes_->mine());
  passes_->end_forward(/*outermost=*/true);
  EXPECT_TRUE(charged()) << "backward follows";
  autograd_.task = 7;
  EXPECT_TRUE(passes_->begin_backward({}).task_is_new);
  EXPECT_FALSE(passes_->follow_backward().task_is_new);
  EXPECT_EQ(autograd_.ends.size(), 1U);
  autograd_.end_pass();
  EXPECT_FALSE(charged());
}

TEST_F(StorePassesTest, InferenceIsChargedWhileItRuns) {
  autograd_.records = false;
  (void)passes_->begin_forward();
  EXPECT_TRUE(charged());
  EXPECT_FALSE(passes_->in_segment());
  passes_->end_forward(/*outermost=*/true);
  EXPECT_FALSE(charged());
}

TEST_F(StorePassesTest, APartWithoutGradientsOfAForwardWithThemIsASegment) {
  (void)passes_->begin_forward();
  autograd_.records = false;
  EXPECT_TRUE(passes_->in_segment());
}

TEST_F(StorePassesTest, WorkAtTheEndOfBackwardRunsOnceAndNotWhereThePassFailed) {
  int runs = 0;
  passes_->at_backward_end([&] { ++runs; });
  autograd_.task = 1;
  (void)passes_->begin_backward({});
  autograd_.fail_pass();
  EXPECT_EQ(runs, 0);
  EXPECT_FALSE(charged());
  autograd_.task = 2;
  (void)passes_->begin_backward({});
  autograd_.end_pass();
  EXPECT_EQ(runs, 1);
}

TEST_F(StorePassesTest, EndsOfAbandonedPassesAreNoEvents) {
  int runs = 0;
  passes_->at_backward_end([&] { ++runs; });
  autograd_.task = 1;
  (void)passes_->begin_backward({});
  passes_->abandon();
  autograd_.end_pass();
  EXPECT_EQ(runs, 0);
}

TEST_F(StorePassesTest, APassMayOutliveTheRecord) {
  autograd_.task = 1;
  (void)passes_->begin_backward({});
  passes_.reset();
  EXPECT_NO_THROW(autograd_.end_pass());
}

TEST_F(StorePassesTest, TheEndOfAStepStopsCharging) {
  (void)passes_->begin_forward();
  passes_->end_forward(/*outermost=*/true);
  passes_->end_step();
  EXPECT_FALSE(charged());
}

}  // namespace
}  // namespace castor::testing
