// Gradients on their way from autograd, and from users, into the payloads of their chunks.
#include "torch/gradient_sink.h"

#include <ATen/ops/sparse_coo_tensor.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "store/errors.h"
#include "torch/test_session.h"

namespace castor::testing {
namespace {

constexpr std::int64_t kWidth = 16;

TestModel small() { return TestModel::layers_of(2, kWidth); }

class GradientSinkTest : public ::testing::Test {
 protected:
  GradientSinkTest() : test_(small()) {}

  /// Runs the update of a reference with gradients that were assigned to its parameters.
  static std::vector<at::Tensor> stepped_with(const std::vector<at::Tensor>& grads) {
    Reference reference(small(), adam(), adam_options());
    for (std::size_t i = 0; i < grads.size(); ++i) {
      reference.model().params[i].mutable_grad() = grads[i];
    }
    reference.step();
    return reference.model().params;
  }
  /// Returns copies of the gradients that there are.
  [[nodiscard]] std::vector<at::Tensor> grads() const {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& param : test_.model().params) {
      copies.push_back(param.grad().clone());
    }
    return copies;
  }

  TestSession test_;
};

TEST_F(GradientSinkTest, AnAssignedGradientIsTheOneThatUpdates) {
  test_.run(batch(kWidth, 1));
  std::vector<at::Tensor> expected = grads();
  expected[2] = at::full({kWidth, kWidth}, 0.25F);
  test_.param(2).mutable_grad() = expected[2].clone();
  test_.step();
  expect_same_bits(test_.values(), stepped_with(expected));
}

TEST_F(GradientSinkTest, GradientsWithoutAnyBackwardUpdate) {
  std::vector<at::Tensor> expected;
  for (const at::Tensor& param : test_.model().params) {
    expected.push_back(at::ones_like(param.detach()));
    param.mutable_grad() = expected.back().clone();
  }
  EXPECT_EQ(test_.step().num_gradients, 4);
  expect_same_bits(test_.values(), stepped_with(expected));
}

TEST_F(GradientSinkTest, AnEditInPlaceIsUsed) {
  test_.run(batch(kWidth, 1));
  {
    const at::NoGradGuard no_grad;
    test_.param(1).grad().mul_(0.5);
  }
  const std::vector<at::Tensor> expected = grads();
  test_.step();
  expect_same_bits(test_.values(), stepped_with(expected));
}

TEST_F(GradientSinkTest, GradientsOfRowsAreAddedAndOtherRowsAreZeros) {
  GradientSink& sink = test_.session().gradients();
  const at::Tensor rows = at::tensor({9, 3}, at::kLong);
  const at::Tensor values = at::rand({2, kWidth});
  at::Tensor expected = at::zeros({kWidth, kWidth});
  for (std::uint64_t arrivals = 1; arrivals <= 2; ++arrivals) {
    sink.rows_arrived(param_id(0), rows, values);
    expected.index_add_(0, rows, values);
    EXPECT_TRUE(same_bits(test_.param(0).grad(), expected));
    EXPECT_EQ(sink.bytes_moved(), arrivals * values.nbytes());
  }
  std::vector<at::Tensor> all{expected.clone(), {}, {}, {}};
  test_.step();
  expect_same_bits(test_.values(), stepped_with(all));
  sink.rows_arrived(param_id(0), rows, values);  // the payload has the last step's
  EXPECT_TRUE(same_bits(test_.param(0).grad() * 2, expected));
}

TEST_F(GradientSinkTest, GradientsOfOtherRowsThanWereNamedAreRefused) {
  GradientSink& sink = test_.session().gradients();
  const at::Tensor rows = at::tensor({9, 3}, at::kLong);
  for (const at::Tensor& values : {at::rand({3, kWidth}), at::rand({2, kWidth + 1}), at::rand({2}),
                                   at::rand({2, kWidth}, at::kDouble)}) {
    expect_thrown<InvalidArgument>([&] { sink.rows_arrived(param_id(0), rows, values); },
                                   "gradients of 2 rows of parameter");
  }
  EXPECT_FALSE(test_.param(0).grad().defined());
}

TEST_F(GradientSinkTest, AGradientThatIsHeldAcrossStepsKeepsItsValues) {
  test_.run(batch(kWidth, 1));
  const at::Tensor held = test_.param(0).grad();
  const at::Tensor values = held.clone();
  test_.step();
  test_.run(batch(kWidth, 2));
  EXPECT_TRUE(same_bits(held, values));
  EXPECT_FALSE(same_bits(test_.param(0).grad(), values));
  const auto& payload =
      test_.session().chunks().manager().payload(test_.chunk_of(0), PayloadKind::kGrad);
  EXPECT_EQ(test_.param(0).grad().const_data_ptr(), payload->data());
}

TEST_F(GradientSinkTest, AViewOfAGradientThatIsHeldKeepsItsValuesToo) {
  test_.run(batch(kWidth, 1));
  const at::Tensor row = test_.param(0).grad().select(0, 3);
  const at::Tensor values = row.clone();
  test_.step();
  test_.run(batch(kWidth, 2));
  EXPECT_TRUE(same_bits(row, values));
}

TEST_F(GradientSinkTest, AGradientThatNobodyHoldsIsOverwrittenInItsPayload) {
  test_.run(batch(kWidth, 1));
  const void* const address = test_.param(0).grad().const_data_ptr();
  test_.step();
  test_.run(batch(kWidth, 2));
  EXPECT_EQ(test_.param(0).grad().const_data_ptr(), address);
}

TEST_F(GradientSinkTest, ZeroedGradientsAddUpAnew) {
  test_.run(batch(kWidth, 1));
  test_.step_keeping_gradients();
  for (const at::Tensor& param : test_.model().params) {
    param.mutable_grad().zero_();
  }
  Reference reference(test_.model().copy(), adam(), adam_options());
  for (const at::Tensor& param : reference.model().params) {
    param.mutable_grad() = at::zeros_like(param.detach());
  }
  test_.run(batch(kWidth, 2));
  reference.run(batch(kWidth, 2));
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(same_bits(test_.param(i).grad(), reference.model().params[i].grad()));
  }
}

TEST_F(GradientSinkTest, ASparseGradientIsRefusedByItsParametersName) {
  const at::Tensor indices = at::zeros({2, 1}, at::kLong);
  test_.param(0).mutable_grad() = at::sparse_coo_tensor(indices, at::ones({1}), {kWidth, kWidth});
  expect_thrown<UsageError>([&] { (void)test_.step(); }, "parameter 'p0' received a sparse");
}

TEST_F(GradientSinkTest, AGradientOfAnotherTypeIsRefused) {
  test_.param(1).mutable_grad() = at::ones({kWidth}, at::kDouble);
  expect_thrown<UsageError>([&] { (void)test_.step(); }, "of type Double");
}

TEST_F(GradientSinkTest, AGradientOfAnotherShapeIsRefused) {
  test_.param(1).mutable_grad() = at::ones({kWidth + 1});
  expect_thrown<UsageError>([&] { (void)test_.step(); }, "another shape");
}

TEST_F(GradientSinkTest, ARefusedGradientChangesNothingAndTheStepMayBeDoneAgain) {
  const std::vector<at::Tensor> before = test_.values();
  test_.run(batch(kWidth, 1));
  const std::vector<at::Tensor> expected = grads();
  test_.param(1).mutable_grad() = at::ones({kWidth}, at::kDouble);
  EXPECT_THROW((void)test_.step(), UsageError);
  expect_same_bits(test_.values(), before);
  EXPECT_TRUE(test_.session().consistent());
  test_.param(1).mutable_grad() = expected[1].clone();
  test_.step();
  expect_same_bits(test_.values(), stepped_with(expected));
}

TEST_F(GradientSinkTest, MarksNameFreshChunksAndPresentGradients) {
  test_.param(3).mutable_grad() = at::ones({kWidth});
  GradientMarks marks = test_.session().gradients().marks();
  EXPECT_EQ(marks.present, (std::vector<bool>{false, false, false, true}));
  EXPECT_FALSE(marks.scale);
  test_.run(batch(kWidth, 1));
  marks = test_.session().gradients().marks();
  EXPECT_EQ(marks.present, std::vector<bool>(4, true));
  EXPECT_EQ(marks.fresh, std::vector<bool>(test_.session().layout().chunks().size(), true));
  EXPECT_EQ(marks.scale, 1.0);
}

TEST_F(GradientSinkTest, AGradientThatIsMadePresentIsZeros) {
  test_.session().make_gradient_present(param_id(2), 1.0);
  EXPECT_TRUE(same_bits(test_.param(2).grad(), at::zeros({kWidth, kWidth})));
  EXPECT_EQ(test_.step().num_gradients, 1);
  EXPECT_EQ(test_.session().steps()[2].item<float>(), 1.0F);
  EXPECT_EQ(test_.session().steps()[0].item<float>(), 0.0F);
}

TEST_F(GradientSinkTest, ScaleMultipliesEveryGradientWhereItLies) {
  test_.run(batch(kWidth, 1));
  std::vector<at::Tensor> expected = grads();
  {
    const at::NoGradGuard no_grad;
    (void)test_.collect();
    test_.session().scale_gradients(0.5);
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(test_.param(i).grad(), expected[i] * 0.5));
  }
}

TEST_F(GradientSinkTest, EditsAreRefusedWhereTheNormWouldBeOfAShardedModel) {
  test_.session().gradients().refuse_edits();
  test_.run(batch(kWidth, 1));
  EXPECT_NO_THROW((void)test_.collect());
  {
    const at::NoGradGuard no_grad;
    test_.param(0).grad().mul_(0.5);
  }
  expect_thrown<UsageError>([&] { (void)test_.collect(); }, "edited in place");
}

TEST_F(GradientSinkTest, AGradientOfAGraphIsCopiedWhenTheStepCollects) {
  const at::Tensor loss = loss_of(test_.forward(batch(kWidth, 1)));
  loss.backward({}, std::nullopt, /*create_graph=*/true);
  EXPECT_TRUE(test_.param(0).grad().requires_grad());
  const std::vector<at::Tensor> expected = [&] {
    const at::NoGradGuard no_grad;
    return grads();
  }();
  test_.step();
  expect_same_bits(test_.values(), stepped_with(expected));
}

TEST_F(GradientSinkTest, BytesThatLeaveTheDeviceAreCounted) {
  test_.run(batch(kWidth, 1));
  EXPECT_EQ(test_.session().gradients().bytes_moved(), 2U * 4 * (kWidth * kWidth + kWidth));
}

TEST(ScaledGradientsTest, MicroBatchesOfDifferentScalesAreRefused) {
  TestModel model = small().typed(ScalarType::kFloat16);
  const TestSession test(model, {.precision = ScalarType::kFloat16});
  test.run(batch(kWidth, 1, at::kHalf), 128.0);
  EXPECT_ANY_THROW(test.run(batch(kWidth, 2, at::kHalf), 256.0));
}

TEST(ScaledGradientsTest, TheSummaryTellsTheScaleAndTheUpdateTakesItOut) {
  TestModel model = small().typed(ScalarType::kFloat16);
  Reference reference(model.copy(), adam(), adam_options());
  const TestSession test(model, {.precision = ScalarType::kFloat16});
  test.run(batch(kWidth, 1, at::kHalf), 128.0);
  const at::Tensor loss = loss_of(reference.model().forward(batch(kWidth, 1, at::kHalf)));
  (loss * 128.0).backward();
  EXPECT_EQ(test.step(1.0 / 128).scale, 128.0);
  reference.step(1.0 / 128);
  expect_same_bits(test.values(), reference.model().params);
}

TEST(ScaledGradientsTest, AnEditOfAScaledGradientIsRefused) {
  TestModel model = small().typed(ScalarType::kFloat16);
  const TestSession test(model, {.precision = ScalarType::kFloat16});
  test.run(batch(kWidth, 1, at::kHalf), 128.0);
  {
    const at::NoGradGuard no_grad;
    test.param(0).grad().mul_(0.5);
  }
  expect_thrown<UsageError>([&] { (void)test.collect(); },
                            "edited while it carries the loss scale");
}

TEST(ScaledGradientsTest, ZeroedGradientsCarryAnyScale) {
  TestModel model = small().typed(ScalarType::kFloat16);
  const TestSession test(model, {.precision = ScalarType::kFloat16});
  test.run(batch(kWidth, 1, at::kHalf), 128.0);
  test.step_keeping_gradients(1.0 / 128);
  {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& param : test.model().params) {
      param.mutable_grad().zero_();
    }
  }
  EXPECT_NO_THROW(test.run(batch(kWidth, 2, at::kHalf), 256.0));
  EXPECT_EQ(test.collect().scale, 256.0);
}

TEST(LinkedGradientsTest, CopiesBesideBackwardArriveBeforeAnybodyReadsThem) {
  Reference reference(small(), adam(), adam_options());
  const TestSession test(small(), {.link_bytes_per_second = std::uint64_t{1} << 30});
  for (std::uint64_t step = 0; step < 3; ++step) {
    test.run(batch(kWidth, step));
    reference.run(batch(kWidth, step));
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(same_bits(test.param(i).grad().clone(), reference.model().params[i].grad()));
    }
    test.step();
    reference.step();
  }
  expect_same_bits(test.values(), reference.model().params);
}

}  // namespace
}  // namespace castor::testing
