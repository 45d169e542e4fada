// Sessions with states and weights on NVMe, and saves that read a session beside its training.
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>
#include <vector>

#include "io/scoped_faults.h"
#include "io/test_support.h"
#include "store/errors.h"
#include "torch/test_session.h"

namespace castor::testing {
namespace {

constexpr std::int64_t kWidth = 64;
constexpr std::size_t kLayers = 6;

TestModel medium() { return TestModel::layers_of(kLayers, kWidth); }

class SessionStorageTest : public ::testing::TestWithParam<Overlap> {
 protected:
  /// Settings with the states, or with all that may leave the host, on NVMe.
  [[nodiscard]] TestSettings on_nvme(bool weights) const {
    TestSettings settings{.overlap = GetParam(), .chunk_bytes = 1 << 14};
    settings.nvme_directory = directory_.string();
    settings.nvme_fraction = 1.0;
    if (weights) {
      settings.host_bytes = least_host_bytes();
    }
    return settings;
  }
  /// Returns a host budget with no room for all parameters and gradients.
  static std::size_t least_host_bytes() {
    return kLayers * 4 * (kWidth * kWidth + kWidth) * 2 * 3 / 4;
  }
  const castor::test::TempDirectory directory_;
};

void expect_trains_as_the_reference(const TestSession& test, int num_steps) {
  Reference reference(medium(), adam(), adam_options());
  for (int step = 0; step < num_steps; ++step) {
    const at::Tensor input = batch(kWidth, static_cast<std::uint64_t>(step));
    test.arm();
    EXPECT_TRUE(same_bits(test.run(input), reference.run(input))) << step;
    test.step();
    reference.step();
  }
  expect_same_bits(test.values(), reference.model().params);
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    test.session().settle(param_id(i));
    const auto states = test.session().optimizer_state().read(param_id(i));
    for (std::size_t state = 0; state < states.size(); ++state) {
      EXPECT_TRUE(same_bits(states[state].reshape({-1}), reference.state(i, state)));
    }
  }
}

TEST_P(SessionStorageTest, StatesOnNvmeTrainTheSame) {
  const TestSession test(medium(), on_nvme(false));
  ASSERT_NE(test.session().memory().nvme(), nullptr);
  EXPECT_TRUE(test.session().optimizer_state().places().stored(test.chunk_of(0)));
  EXPECT_TRUE(test.session().states(param_id(0)).empty()) << "they have no memory to show";
  expect_trains_as_the_reference(test, 3);
}

TEST_P(SessionStorageTest, WeightsOnNvmeTrainTheSameAndHaveNoAddress) {
  const TestSession test(medium(), on_nvme(true));
  std::size_t num_stored = 0;
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    num_stored += test.session().chunks().stored(test.chunk_of(i)) ? 1 : 0;
  }
  ASSERT_GT(num_stored, 0U);
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    if (test.session().chunks().stored(test.chunk_of(i))) {
      EXPECT_THROW((void)test.param(i).storage().data(), c10::Error);
      EXPECT_TRUE(same_bits(test.param(i).detach().clone(), medium().params[i]))
          << "an operator brings it into memory";
    }
  }
  expect_trains_as_the_reference(test, 3);
}

TEST_P(SessionStorageTest, AWriteOfAWeightOnNvmeIsKept) {
  const TestSession test(medium(), on_nvme(true));
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    test.param(i).fill_(static_cast<float>(i));
  }
  test.session().move_to_host();
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    EXPECT_TRUE(same_bits(test.param(i).detach().clone(),
                          at::full(test.param(i).sizes(), static_cast<float>(i))));
  }
}

TEST_P(SessionStorageTest, AVisitGivesAWeightOnNvmeAnAddress) {
  const TestSession test(medium(), on_nvme(true));
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    const auto visit = test.session().visit(param_id(i), /*writes=*/false);
    EXPECT_EQ(visit != nullptr, test.session().chunks().stored(test.chunk_of(i)));
    EXPECT_NE(test.param(i).storage().data(), nullptr);
  }
}

TEST_P(SessionStorageTest, GradientsOnNvmeAreReadAndEditedByOperators) {
  Reference reference(medium(), adam(), adam_options());
  const TestSession test(medium(), on_nvme(true));
  test.run(batch(kWidth, 1));
  reference.run(batch(kWidth, 1));
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 2 * kLayers; ++i) {
      EXPECT_TRUE(same_bits(test.param(i).grad().clone(), reference.model().params[i].grad()));
      test.param(i).grad().mul_(0.5);
      reference.model().params[i].grad().mul_(0.5);
    }
  }
  const GradientSummary summary = test.step();
  EXPECT_GT(summary.norm, 0.0);
  reference.step();
  expect_same_bits(test.values(), reference.model().params);
}

TEST_P(SessionStorageTest, AStepWhoseStatesCannotBeReadBreaksTheRunUntilALoad) {
  const ScopedFaults faults("read:5+:EIO");
  const TestSession test(medium(), on_nvme(false));
  bool failed = false;
  for (int step = 0; step < 4 && !failed; ++step) {
    try {
      test.arm();
      test.run(batch(kWidth, 1));
      test.step();
      test.session().await_updates();
    } catch (const std::exception&) {
      failed = true;
    }
  }
  ASSERT_TRUE(failed);
  EXPECT_FALSE(test.session().consistent());
  expect_thrown<UsageError>([&] { (void)test.forward(batch(kWidth, 1)); }, "checkpoint");
}

TEST(SessionStorageRefusalTest, AFullNvmeTierIsRefusedAndTouchesNoParameter) {
  const castor::test::TempDirectory directory;
  TestSettings settings{.chunk_bytes = 1 << 14, .nvme_directory = directory.string()};
  settings.nvme_bytes = 4096;
  settings.nvme_fraction = 1.0;
  const TestModel model = medium();
  const void* const address = model.params[0].const_data_ptr();
  EXPECT_THROW((void)create_session(model, settings), OutOfMemory);
  EXPECT_EQ(model.params[0].const_data_ptr(), address);
  expect_same_bits(model.params, medium().params);
}

TEST(SessionStorageRefusalTest, AMissingDirectoryIsRefusedAndTouchesNoParameter) {
  const TestModel model = medium();
  const void* const address = model.params[0].const_data_ptr();
  EXPECT_THROW((void)create_session(model, {.nvme_directory = "/nowhere", .nvme_fraction = 1.0}),
               Error);
  EXPECT_EQ(model.params[0].const_data_ptr(), address);
}

INSTANTIATE_TEST_SUITE_P(Overlaps, SessionStorageTest,
                         ::testing::Values(Overlap::kNone, Overlap::kForward, Overlap::kBackward),
                         [](const auto& info) {
                           return std::string(info.param == Overlap::kNone      ? "none"
                                              : info.param == Overlap::kForward ? "forward"
                                                                                : "backward");
                         });

// Saves beside the training.

class SaveTest : public ::testing::TestWithParam<Overlap> {
 protected:
  SaveTest() : test_(medium(), {.overlap = GetParam(), .chunk_bytes = 1 << 14}) {
    test_.run(batch(kWidth, 1));
    test_.step();
  }
  /// Begins a save with memory for copies of all chunks, so that nobody waits for its reads.
  std::vector<ChunkId> begin() {
    std::vector<ChunkId> reachable = test_.session().begin_reads();
    std::vector<ChunkId> all;
    for (std::size_t i = 0; i < test_.session().layout().chunks().size(); ++i) {
      all.push_back(chunk_id(i));
    }
    test_.session().updates().copies().begin(all, /*states=*/true, std::size_t{1} << 30);
    return reachable;
  }
  void end() {
    test_.session().reads().end_all();
    test_.session().updates().copies().end();
  }
  TestSession test_;
};

TEST_P(SaveTest, ASaveReadsTheWeightsAndStatesOfItsBeginningWhileTrainingGoesOn) {
  const std::vector<at::Tensor> weights = test_.values();
  std::vector<std::vector<at::Tensor>> states;
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    states.push_back(test_.session().optimizer_state().read(param_id(i)));
  }
  EXPECT_TRUE(begin().empty());
  std::promise<void> stepped;
  std::thread save([&, started = stepped.get_future()]() mutable {
    started.wait();
    const OptimizerState& state = test_.session().optimizer_state();
    for (std::size_t i = 0; i < 2 * kLayers; ++i) {
      EXPECT_TRUE(same_bits(state.saved_weights(param_id(i)), weights[i]));
      expect_same_bits(state.saved_states(param_id(i)), states[i]);
    }
  });
  test_.arm();
  test_.run(batch(kWidth, 2));
  test_.step();
  test_.session().await_updates();
  EXPECT_FALSE(same_bits(test_.param(0).detach().clone(), weights[0]));
  stepped.set_value();
  save.join();
  end();
  EXPECT_FALSE(test_.session().reads().reading());
}

TEST_P(SaveTest, AWriteOfAnOperatorLeavesTheSnapshotAsItWas) {
  const at::Tensor before = test_.param(0).detach().clone();
  EXPECT_TRUE(begin().empty());
  {
    const at::NoGradGuard no_grad;
    test_.param(0).zero_();
  }
  EXPECT_TRUE(same_bits(test_.session().optimizer_state().saved_weights(param_id(0)), before));
  EXPECT_TRUE(same_bits(test_.param(0).detach().clone(), at::zeros({kWidth, kWidth})));
  end();
}

TEST_P(SaveTest, ChunksThatOthersCanReachAreNamed) {
  const at::Tensor alias = test_.param(0).detach();
  EXPECT_EQ(begin(), std::vector<ChunkId>{test_.chunk_of(0)});
  end();
}

TEST_P(SaveTest, ASecondSaveIsRefusedWhileTheFirstReads) {
  (void)test_.session().begin_reads();
  EXPECT_THROW((void)test_.session().begin_reads(), UsageError);
  test_.session().reads().end_all();
  EXPECT_NO_THROW((void)test_.session().begin_reads());
  test_.session().reads().end_all();
}

TEST_P(SaveTest, ASessionMayEndWhileASaveHasNotReadAll) {
  (void)begin();
  EXPECT_NO_THROW(test_.end());
}

INSTANTIATE_TEST_SUITE_P(Overlaps, SaveTest,
                         ::testing::Values(Overlap::kNone, Overlap::kForward, Overlap::kBackward),
                         [](const auto& info) {
                           return std::string(info.param == Overlap::kNone      ? "none"
                                              : info.param == Overlap::kForward ? "forward"
                                                                                : "backward");
                         });

}  // namespace
}  // namespace castor::testing
