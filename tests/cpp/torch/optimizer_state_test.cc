// Optimizer states as users see them, and parameters that users have given other memory.
#include "torch/optimizer_state.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "store/errors.h"
#include "torch/chunk_storages.h"
#include "torch/param_memory.h"
#include "torch/test_session.h"

namespace castor::testing {
namespace {

constexpr std::int64_t kWidth = 24;

TestModel small() { return TestModel::layers_of(2, kWidth); }

TestModel narrow() { return small().typed(ScalarType::kBFloat16); }

TestSettings split(StateFormat format = StateFormat::kSplit) {
  return {.rule = adam(format), .precision = ScalarType::kBFloat16};
}

TEST(OptimizerStateTest, StatesAreNamedByTheirRule) {
  const TestSession test(small());
  EXPECT_EQ(test.session().optimizer_state().values().names(param_id(0)),
            (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(test.session().optimizer_state().values().format(), StateFormat::kFp32);
  EXPECT_EQ(test.session().updates().chunk_updates().rule().name(), "adam");
}

TEST(OptimizerStateTest, AnFp32ParameterBesideSplitOnesKeepsFp32States) {
  TestModel model = narrow();
  model.types[1] = ScalarType::kFloat32;
  const TestSession test(model, split());
  EXPECT_EQ(test.session().optimizer_state().values().format(param_id(0)), StateFormat::kSplit);
  EXPECT_EQ(test.session().optimizer_state().values().format(param_id(1)), StateFormat::kFp32);
}

TEST(OptimizerStateTest, ZeroMakesTheFirstValuesOfAllStates) {
  const TestSession test(small());
  test.run(batch(kWidth, 1));
  test.step();
  test.session().settle();
  test.session().optimizer_state().zero();
  for (std::size_t i = 0; i < 4; ++i) {
    for (const at::Tensor& state : test.session().states(param_id(i))) {
      EXPECT_FALSE(state.any().item<bool>());
    }
  }
}

TEST(OptimizerStateTest, StatesOfBlocksHaveARowPerBlock) {
  const TestSession test(narrow(), split(StateFormat::kSplitInt8));
  const auto& states = test.session().states(param_id(0));
  ASSERT_EQ(states.size(), 3U);
  EXPECT_EQ(states[0].scalar_type(), at::kByte);
  EXPECT_EQ(states[0].sizes(), at::IntArrayRef({kWidth, kWidth}));
  EXPECT_EQ(states[2].sizes(), at::IntArrayRef({(kWidth * kWidth + 255) / 256, 2}));
}

TEST(OptimizerStateTest, WriteTakesBackWhatReadGave) {
  const TestSession test(small());
  test.run(batch(kWidth, 1));
  test.step();
  test.session().settle();
  OptimizerState& state = test.session().optimizer_state();
  const std::vector<at::Tensor> values = state.read(param_id(0));
  state.zero();
  state.write(param_id(0), values);
  expect_same_bits(state.read(param_id(0)), values);
}

TEST(OptimizerStateTest, WriteRefusesStatesOfOtherNumberShapeOrType) {
  const TestSession test(small());
  OptimizerState& state = test.session().optimizer_state();
  const std::vector<at::Tensor> values = state.read(param_id(0));
  const auto write = [&](std::vector<at::Tensor> states) { state.write(param_id(0), states); };
  EXPECT_THROW(write({values[0]}), InvalidArgument);
  EXPECT_THROW(write({values[0], values[1].flatten()}), InvalidArgument);
  EXPECT_THROW(write({values[0], values[1].to(at::kDouble)}), InvalidArgument);
  EXPECT_THROW(write({values[0], values[1].t()}), InvalidArgument);
  EXPECT_NO_THROW(write(values));
}

TEST(OptimizerStateTest, AdoptGivesAParameterAndItsMasterTheValuesOfAnyType) {
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::kSplit}) {
    const TestSession test(narrow(), split(format));
    const at::Tensor values = at::rand({kWidth, kWidth}, at::kDouble);
    test.session().optimizer_state().adopt(param_id(0), values);
    EXPECT_TRUE(
        same_bits(*test.session().optimizer_state().master(param_id(0)), values.to(at::kFloat)));
    EXPECT_TRUE(same_bits(test.param(0), values.to(at::kFloat).to(at::kBFloat16)));
  }
}

TEST(OptimizerStateTest, AdoptRefusesValuesOfAnotherShape) {
  const TestSession test(narrow(), split());
  EXPECT_THROW(test.session().optimizer_state().adopt(param_id(0), at::rand({kWidth})),
               InvalidArgument);
}

TEST(OptimizerStateTest, SetMasterLeavesTheParameterAsItIs) {
  const TestSession test(narrow(), split(StateFormat::kFp32));
  const at::Tensor before = test.param(0).detach().clone();
  const at::Tensor master = at::rand({kWidth, kWidth});
  EXPECT_TRUE(test.session().optimizer_state().set_master(param_id(0), master));
  EXPECT_TRUE(same_bits(test.param(0), before));
  EXPECT_TRUE(same_bits(*test.session().optimizer_state().master_view(param_id(0)), master));
  const TestSession exact(small());
  EXPECT_FALSE(exact.session().optimizer_state().set_master(param_id(0), master));
  EXPECT_FALSE(exact.session().optimizer_state().master(param_id(0)));
}

TEST(OptimizerStateTest, ElementsThatAreOverwrittenBecomeTheirOwnMasters) {
  TestModel model = narrow();
  const at::Tensor exact = model.params[0].detach().clone();
  const TestSession test(model, split());
  const at::NoGradGuard no_grad;
  at::Tensor values = test.param(0).detach().clone();
  values[0].fill_(3);
  test.session().optimizer_state().before_overwrite(param_id(0), values);
  test.param(0).copy_(values);
  const at::Tensor master = *test.session().optimizer_state().master(param_id(0));
  EXPECT_TRUE(same_bits(master[0], at::full({kWidth}, 3.0F)));
  EXPECT_TRUE(same_bits(master[1], exact[1])) << "a row that keeps its values keeps its master";
}

TEST(OptimizerStateTest, StridedParametersKeepTheirOrderInStatesAndMasters) {
  TestModel model = narrow();
  model.params[0] =
      at::rand({kWidth, kWidth}).t().clone(at::MemoryFormat::Preserve).set_requires_grad(true);
  const at::Tensor exact = model.params[0].detach().clone();
  const TestSession test(model, split(StateFormat::kFp32));
  EXPECT_TRUE(same_bits(*test.session().optimizer_state().master(param_id(0)), exact));
  EXPECT_EQ(test.session().states(param_id(0))[0].strides(), at::IntArrayRef({1, kWidth}));
}

TEST(StateViewsTest, TheSameTensorsAreShownAtEveryCall) {
  const TestSession test(small());
  const at::Tensor first = test.session().states(param_id(0))[0];
  test.run(batch(kWidth, 1));
  test.step();
  EXPECT_TRUE(first.is_same(test.session().states(param_id(0))[0]));
  EXPECT_TRUE(first.any().item<bool>()) << "it shows the updated values";
}

TEST(StateViewsTest, ReleasedViewsKeepTheirValuesInMemoryOfTheirOwn) {
  const TestSession test(small());
  test.run(batch(kWidth, 1));
  test.step();
  const at::Tensor shown = test.session().states(param_id(0))[0];
  const at::Tensor values = shown.clone();
  test.session().settle();
  test.session().release_states(param_id(0));
  test.session().optimizer_state().zero();
  EXPECT_TRUE(same_bits(shown, values));
  EXPECT_FALSE(shown.is_same(test.session().states(param_id(0))[0]));
}

TEST(StateViewsTest, AWriteOfAStateIsUsedByTheNextUpdate) {
  const TestSession test(small());
  const std::vector<at::Tensor> before = test.values();
  test.run(batch(kWidth, 1));
  {
    const at::NoGradGuard no_grad;
    test.session().states(param_id(0))[1].fill_(std::numeric_limits<float>::infinity());
  }
  test.step();
  EXPECT_TRUE(same_bits(test.param(0), before[0])) << "divided by the root of infinity";
  EXPECT_FALSE(same_bits(test.param(1), before[1]));
}

TEST(ParamMemoryTest, MemoryThatAParameterIsGivenGoesIntoTheChunkAtTheNextForward) {
  const TestSession test(small());
  const at::Tensor values = at::rand({kWidth, kWidth});
  test.param(0).set_data(values.clone());
  (void)test.forward(batch(kWidth, 1));
  test.session().move_to_host();
  EXPECT_TRUE(same_bits(test.param(0), values));
  const auto& payload =
      test.session().chunks().manager().payload(test.chunk_of(0), PayloadKind::kParam);
  EXPECT_EQ(test.param(0).const_data_ptr(), payload->data());
}

TEST(ParamMemoryTest, TensorsOverTheOldMemoryKeepTheOldValues) {
  const TestSession test(small());
  const at::Tensor backup = test.param(0).detach();
  const at::Tensor before = backup.clone();
  test.param(0).set_data(at::zeros({kWidth, kWidth}));
  test.session().settle();
  EXPECT_TRUE(same_bits(backup, before));
  EXPECT_TRUE(same_bits(test.param(0), at::zeros({kWidth, kWidth})));
  test.param(0).set_data(backup);  // averages that are swapped in and out
  test.session().settle();
  EXPECT_TRUE(same_bits(test.param(0), before));
}

TEST(ParamMemoryTest, TensorsOverTheGivenMemoryFollowTheParameter) {
  const TestSession test(small());
  const at::Tensor given = at::rand({kWidth, kWidth});
  test.param(0).set_data(given);
  test.session().settle();
  const at::NoGradGuard no_grad;
  given.fill_(2);
  EXPECT_TRUE(same_bits(test.param(0), at::full({kWidth, kWidth}, 2.0F)));
}

TEST(ParamMemoryTest, OtherShapesAndTypesAreRefusedAndTheParameterStays) {
  const TestSession test(small());
  const at::Tensor before = test.param(0).detach().clone();
  test.param(0).set_data(at::zeros({3}));
  expect_thrown<UsageError>([&] { test.session().settle(); }, "parameter 'p0' was given other");
  EXPECT_EQ(test.param(0).sizes(), at::IntArrayRef({3}));
  test.param(0).set_data(before);
  EXPECT_NO_THROW(test.session().settle());
  EXPECT_TRUE(same_bits(test.param(0), before));
}

TEST(ParamMemoryTest, TheMemoryOfAnotherParameterIsRefused) {
  const TestSession test(small());
  test.param(0).set_data(test.param(2));
  expect_thrown<UsageError>([&] { test.session().settle(); }, "the memory of parameter 'p2'");
}

TEST(ParamMemoryTest, ParametersThatAreSwappedTakeEachOthersValues) {
  const TestSession test(small());
  const at::Tensor first = test.param(0).detach().clone();
  const at::Tensor second = test.param(2).detach().clone();
  const at::Tensor memory = test.param(0).detach();
  test.param(0).set_data(test.param(2));
  test.param(2).set_data(memory);
  test.session().settle();
  EXPECT_TRUE(same_bits(test.param(0), second));
  EXPECT_TRUE(same_bits(test.param(2), first));
}

TEST(ParamMemoryTest, AParameterInOtherMemoryIsUpdatedInItsChunk) {
  Reference reference(small(), adam(), adam_options());
  const TestSession test(small());
  test.run(batch(kWidth, 1));
  reference.run(batch(kWidth, 1));
  const at::Tensor values = at::rand({kWidth, kWidth});
  test.param(0).set_data(values.clone());
  reference.model().params[0].set_data(values.clone());
  test.step();
  reference.step();
  expect_same_bits(test.values(), reference.model().params);
}

TEST(ParamMemoryTest, OrdinaryTensorsThatFillTheirStorageCanFollow) {
  EXPECT_TRUE(ParamMemory::fills_storage(at::zeros({4, 3}), at::kFloat));
  EXPECT_TRUE(ParamMemory::fills_storage(at::zeros({4, 3}).t(), at::kFloat));
  EXPECT_FALSE(ParamMemory::fills_storage(at::zeros({4, 3}), at::kBFloat16));
  EXPECT_FALSE(ParamMemory::fills_storage(at::zeros({4, 3})[0], at::kFloat));
}

}  // namespace
}  // namespace castor::testing
