// Passes of several threads over one session, and passes that fail.
#include "store/passes.h"

#include <gtest/gtest.h>

#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "store/charged_account.h"
#include "store/errors.h"
#include "torch/test_session.h"

namespace castor::testing {
namespace {

constexpr std::int64_t kWidth = 16;

TestModel small() { return TestModel::layers_of(3, kWidth); }

/// Counts the looks of threads that wait for a turn: a thread that has looked is waiting.
class Waiting {
 public:
  Waiting() {
    looks() = 0;
    PassTurn::look_by([] { ++looks(); });
  }
  ~Waiting() {
    PassTurn::look_by([] {});
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  /// Returns once a thread waits.
  static void await() {
    while (looks() == 0) {
      std::this_thread::yield();
    }
  }

 private:
  static std::atomic<int>& looks() {
    static std::atomic<int> looks = 0;
    return looks;
  }
};

/// Throws in backward, behind the layers that come after it in forward.
class FailingHook final : public ::torch::autograd::FunctionPreHook {
 public:
  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& /*grads*/) override {
    throw std::runtime_error("backward failed");
  }
};

void expect_trains_as_a_new_one(const TestSession& test) {
  Reference reference(small(), adam(), adam_options());
  test.zero_grad();
  test.run(batch(kWidth, 3));
  reference.run(batch(kWidth, 3));
  test.step();
  reference.step();
  expect_same_bits(test.values(), reference.model().params);
}

TEST(PassesTest, AThreadsForwardWaitsForTheForwardOfAnother) {
  const TestSession test(small());
  const Waiting waiting;
  std::atomic<bool> over = false;
  std::jthread other;
  (void)test.forward(batch(kWidth, 1), [&](std::size_t layer) {
    if (layer == 1) {
      other = std::jthread([&] {
        const at::NoGradGuard no_grad;
        (void)test.forward(batch(kWidth, 2));
        EXPECT_TRUE(over);
      });
      Waiting::await();
      EXPECT_FALSE(over);
    }
    over = layer == 2;
  });
}

TEST(PassesTest, ATurnKeepsTheForwardsOfOtherThreadsOut) {
  const TestSession test(small());
  const Waiting waiting;
  std::atomic<bool> over = false;
  std::jthread other;
  {
    const Session::Turn turn(test.shared(), PassTurn::Section::kPlain, "a save");
    other = std::jthread([&] {
      const at::NoGradGuard no_grad;
      (void)test.forward(batch(kWidth, 2));
      EXPECT_TRUE(over);
    });
    Waiting::await();
    over = true;
  }
}

TEST(PassesTest, TurnsOfOneThreadNest) {
  const TestSession test(small());
  const Session::Turn outer(test.shared(), PassTurn::Section::kPlain, "a step");
  const Session::Turn inner(test.shared(), PassTurn::Section::kPlain, "a save");
  EXPECT_NO_THROW(test.session().settle());
  const at::NoGradGuard no_grad;
  EXPECT_NO_THROW((void)test.forward(batch(kWidth, 1)));
}

TEST(PassesTest, ThreadsThatTrainInTurnsLeaveTheWeightsOfSomeOrder) {
  // Each thread does the same steps, so that the weights do not depend on who was first.
  constexpr int kThreads = 3;
  constexpr int kSteps = 4;
  Reference reference(small(), adam(), adam_options());
  const TestSession test(small(), {.overlap = Overlap::kForward});
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int step = 0; step < kSteps; ++step) {
          const at::Tensor input = at::full({4, kWidth}, 0.5F);
          const Session::Turn turn(test.shared(), PassTurn::Section::kRunsBackward, "a step");
          test.run(input);
          test.step();
        }
      });
    }
  }
  for (int step = 0; step < kThreads * kSteps; ++step) {
    reference.run(at::full({4, kWidth}, 0.5F));
    reference.step();
  }
  expect_same_bits(test.values(), reference.model().params);
  EXPECT_EQ(test.session().runtime().counts().steps, std::uint64_t{kThreads * kSteps});
}

TEST(PassesTest, AForwardThatFailedEndsItsPass) {
  const TestSession test(small());
  EXPECT_THROW((void)test.forward(batch(kWidth, 1),
                                  [](std::size_t layer) {
                                    if (layer == 1) {
                                      throw std::runtime_error("forward failed");
                                    }
                                  }),
               std::runtime_error);
  EXPECT_TRUE(test.session().runtime().idle());
  EXPECT_EQ(charged_account(), nullptr);
  std::jthread([&] {
    const at::NoGradGuard no_grad;
    (void)test.forward(batch(kWidth, 2));
  }).join();
  expect_trains_as_a_new_one(test);
}

TEST(PassesTest, ABackwardThatFailedInTheMiddleEndsItsPass) {
  const TestSession test(small(), {.overlap = Overlap::kForward});
  test.enter(0);
  at::Tensor values = batch(kWidth, 1);
  for (std::size_t i = 0; i < 3; ++i) {
    test.enter(i + 1);
    values = test.model().run_layer(i, values);
    if (i == 1) {
      values.grad_fn()->add_tensor_pre_hook(std::make_unique<FailingHook>());
    }
    test.leave(i + 1, values);
  }
  test.leave(0, values);
  EXPECT_THROW(loss_of(values).backward(), std::runtime_error);
  EXPECT_TRUE(test.param(4).grad().defined());
  EXPECT_FALSE(test.param(0).grad().defined());
  EXPECT_EQ(charged_account(), nullptr);
  std::jthread([&] { test.session().move_to_host(); }).join();
  expect_trains_as_a_new_one(test);
}

TEST(PassesTest, AForwardWhoseLossIsDroppedEndsWithTheNextForward) {
  const TestSession test(small());
  (void)test.forward(batch(kWidth, 1));
  (void)test.forward(batch(kWidth, 2));
  expect_trains_as_a_new_one(test);
}

TEST(PassesTest, AThreadThatEndedWithinAForwardLeavesTheModelToTheOthers) {
  const TestSession test(small());
  std::jthread([&] {
    test.enter(0);
    test.enter(1);
  }).join();
  EXPECT_FALSE(test.session().runtime().idle());
  expect_trains_as_a_new_one(test);
}

TEST(PassesTest, TheEndOfAModuleThatWasNotEnteredIsNoEvent) {
  const TestSession test(small());
  EXPECT_NO_THROW(test.session().exit(module_id(1)));
  EXPECT_NO_THROW(test.session().expect_no_backward());
  expect_trains_as_a_new_one(test);
}

TEST(PassesTest, ABackwardOfARetainedGraphRunsAgain) {
  Reference reference(small(), adam(), adam_options());
  const TestSession test(small());
  const auto twice = [](const at::Tensor& loss) {
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  twice(loss_of(test.forward(batch(kWidth, 1))));
  twice(loss_of(reference.model().forward(batch(kWidth, 1))));
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_TRUE(same_bits(test.param(i).grad(), reference.model().params[i].grad()));
  }
}

TEST(PassesTest, AModelWhosePassIsRunningMayBeDroppedByItsUser) {
  TestModel model = small();
  TestSession test(model);
  const at::Tensor loss = loss_of(test.forward(batch(kWidth, 1)));
  test.end();
  EXPECT_NO_THROW(loss.backward());
  EXPECT_TRUE(model.params[0].grad().defined()) << "torch's own, of an ordinary parameter";
}

}  // namespace
}  // namespace castor::testing
