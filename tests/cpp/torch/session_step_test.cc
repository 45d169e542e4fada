// Steps of a session, compared with the same training in plain libtorch, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "store/errors.h"
#include "torch/test_session.h"

namespace castor::testing {
namespace {

constexpr std::int64_t kWidth = 24;
constexpr std::size_t kLayers = 4;

TestModel small() { return TestModel::layers_of(kLayers, kWidth); }

/// Precision of the model's parameters, and the rule and format of their states.
struct Format {
  std::string name;
  ScalarType type;
  std::string rule;
  StateFormat format;
};

const std::vector<Format>& formats() {
  static const std::vector<Format> formats{
      {"fp32", ScalarType::kFloat32, "adam", StateFormat::kFp32},
      {"bf16", ScalarType::kBFloat16, "adam", StateFormat::kFp32},
      {"bf16_split", ScalarType::kBFloat16, "adam", StateFormat::kSplit},
      {"bf16_split_bf16", ScalarType::kBFloat16, "adam", StateFormat::kSplitBf16},
      {"bf16_split_int8", ScalarType::kBFloat16, "adam", StateFormat::kSplitInt8},
      {"sgd_momentum", ScalarType::kFloat32, "sgd_momentum", StateFormat::kFp32},
      {"bf16_lion_split", ScalarType::kBFloat16, "lion", StateFormat::kSplit}};
  return formats;
}

RuleOptions options_of(const UpdateRule& rule) {
  if (rule.name() == "adam") {
    return adam_options(1e-2, 0.1);
  }
  RuleOptions options{};
  for (std::size_t i = 0; i < rule.option_names().size(); ++i) {
    const std::string_view name = rule.option_names()[i];
    options[i] = name == "lr"         ? 1e-2
                 : name == "momentum" ? 0.9
                 : name == "beta1"    ? 0.9
                 : name == "beta2"    ? 0.99
                                      : 0.0;
  }
  return options;
}

using Setting = std::tuple<std::size_t, Overlap, bool>;  // format, overlap, whether chunks stream

class StepParityTest : public ::testing::TestWithParam<Setting> {};

TEST_P(StepParityTest, StepsHaveTheBitsOfPlainLibtorch) {
  const auto& [number, overlap, streams] = GetParam();
  const Format& format = formats()[number];
  const std::shared_ptr<const UpdateRule> rule = make_update_rule(format.rule, format.format);
  TestSettings settings{.rule = rule,
                        .options = options_of(*rule),
                        .precision = format.type,
                        .overlap = overlap,
                        .chunk_bytes = 4096};
  if (streams) {
    settings.device_bytes = 24 << 10;  // less than half of the fp32 parameters and activations
    settings.policy = PlacementPolicy::kAuto;
  }
  const TestModel model = TestModel::layers_of(streams ? 8 : kLayers, kWidth).typed(format.type);
  Reference reference(model.copy(), rule, settings.options);
  const TestSession test(model, settings);
  const at::ScalarType input_type = model.params[0].scalar_type();
  for (std::uint64_t step = 1; step <= 4; ++step) {
    const at::Tensor input = batch(kWidth, step, input_type);
    test.arm();
    EXPECT_TRUE(same_bits(test.run(input), reference.run(input))) << "loss of step " << step;
    test.step();
    reference.step();
  }
  expect_same_bits(test.values(), reference.model().params);
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    const auto states = test.session().states(param_id(i));
    for (std::size_t state = 0; state < states.size(); ++state) {
      EXPECT_TRUE(same_bits(states[state].reshape({-1}), reference.state(i, state)))
          << "state " << state << " of parameter " << i;
    }
  }
  EXPECT_LE(test.session().memory().device_tier()->ledger().peak(), settings.device_bytes);
  if (streams) {
    EXPECT_GT(test.session().runtime().transfers().evictions, 0U);
  }
}

std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  const auto& [number, overlap, streams] = info.param;
  return formats()[number].name +
         (overlap == Overlap::kNone      ? "_none"
          : overlap == Overlap::kForward ? "_forward"
                                         : "_backward") +
         (streams ? "_streamed" : "");
}

INSTANTIATE_TEST_SUITE_P(Formats, StepParityTest,
                         ::testing::Combine(::testing::Range(std::size_t{0}, std::size_t{7}),
                                            ::testing::Values(Overlap::kNone, Overlap::kForward,
                                                              Overlap::kBackward),
                                            ::testing::Bool()),
                         name_of);

TEST(SessionStepTest, GradientsOfSeveralBackwardsAddUp) {
  Reference reference(small().copy(), adam(), adam_options());
  const TestSession test(small());
  for (std::uint64_t micro = 0; micro < 3; ++micro) {
    test.run(batch(kWidth, micro));
    reference.run(batch(kWidth, micro));
  }
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    EXPECT_TRUE(same_bits(test.param(i).grad(), reference.model().params[i].grad()));
  }
  test.step();
  reference.step();
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, GradientsLieInThePayloadsOfTheirChunks) {
  const TestSession test(small());
  test.run(batch(kWidth, 1));
  for (std::size_t i = 0; i < 2 * kLayers; ++i) {
    const auto& payload =
        test.session().chunks().manager().payload(test.chunk_of(i), PayloadKind::kGrad);
    EXPECT_EQ(test.param(i).grad().const_data_ptr(),
              payload->data() + 4 * test.session().layout().place(param_id(i)).offset);
  }
}

TEST(SessionStepTest, TheSummaryHasTheSquaresOfEachGradient) {
  const TestSession test(small());
  test.run(batch(kWidth, 1));
  std::vector<at::Tensor> grads;
  for (const at::Tensor& param : test.model().params) {
    grads.push_back(param.grad().clone());
  }
  const GradientSummary summary = test.step();
  EXPECT_EQ(summary.num_gradients, 2 * kLayers);
  EXPECT_EQ(summary.scale, 1.0);
  ASSERT_EQ(summary.squares.size(), grads.size());
  double sum = 0;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const double square = grads[i].to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(summary.squares[i], square, 1e-12 * square);
    sum += summary.squares[i];
  }
  EXPECT_EQ(summary.norm, std::sqrt(sum));
}

TEST(SessionStepTest, TheClipCoefficientMultipliesEveryGradient) {
  Reference reference(small().copy(), adam(), adam_options());
  const TestSession test(small());
  test.run(batch(kWidth, 1));
  reference.run(batch(kWidth, 1));
  test.step(0.125);
  reference.step(0.125);
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, ANonFiniteGradientMakesTheNormNonFiniteAndASkippedStepChangesNothing) {
  const TestSession test(small());
  const std::vector<at::Tensor> before = test.values();
  const float infinity = std::numeric_limits<float>::infinity();
  test.run(batch(kWidth, 1));
  {
    const at::NoGradGuard no_grad;
    test.param(3).grad()[5].fill_(infinity);
    const Session::Turn turn(test.shared(), PassTurn::Section::kPlain, "an optimizer.step()");
    const GradientSummary summary = test.collect();
    EXPECT_FALSE(std::isfinite(summary.norm));
    EXPECT_FALSE(std::isfinite(summary.squares[3]));
    EXPECT_TRUE(std::isfinite(summary.squares[2]));
    test.session().finish_step();  // skips the update
  }
  expect_same_bits(test.values(), before);
  EXPECT_EQ(test.session().steps().sum().item<float>(), 0.0F);
  EXPECT_TRUE(test.session().consistent());
  test.zero_grad();
  Reference reference(small().copy(), adam(), adam_options());
  test.run(batch(kWidth, 2));
  reference.run(batch(kWidth, 2));
  test.step();
  reference.step();
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, FrozenParametersStayAndHaveNoGradientPayload) {
  TestModel model = small();
  model.freeze(2).freeze(3);
  const at::Tensor frozen = model.params[2].clone();
  Reference reference(model.copy(), adam(), adam_options());
  const TestSession test(model);
  test.run(batch(kWidth, 1));
  reference.run(batch(kWidth, 1));
  const GradientSummary summary = test.step();
  reference.step();
  EXPECT_EQ(summary.num_gradients, 2 * kLayers - 2);
  EXPECT_EQ(test.session().chunks().manager().payload(test.chunk_of(2), PayloadKind::kGrad),
            nullptr);
  EXPECT_TRUE(same_bits(test.param(2), frozen));
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, AParameterWithoutAGradientTakesNoStep) {
  const TestSession test(small());
  const std::vector<at::Tensor> before = test.values();
  test.enter(0);
  test.enter(1);
  const at::Tensor output = test.model().run_layer(0, batch(kWidth, 1));
  test.leave(1, output);
  test.leave(0, output);
  loss_of(output).backward();
  const GradientSummary summary = test.step();
  EXPECT_EQ(summary.num_gradients, 2U);
  EXPECT_FALSE(same_bits(test.param(0), before[0]));
  for (std::size_t i = 2; i < 2 * kLayers; ++i) {
    EXPECT_TRUE(same_bits(test.param(i), before[i]));
    EXPECT_EQ(test.session().steps()[static_cast<std::int64_t>(i)].item<float>(), 0.0F);
  }
  EXPECT_EQ(test.session().steps()[0].item<float>(), 1.0F);
}

TEST(SessionStepTest, AParameterWithoutAGroupIsLeftOut) {
  const TestSession test(small());
  const std::vector<at::Tensor> before = test.values();
  test.run(batch(kWidth, 1));
  {
    const at::NoGradGuard no_grad;
    const Session::Turn turn(test.shared(), PassTurn::Section::kPlain, "an optimizer.step()");
    (void)test.collect();
    GroupOptions options = test.group_options();
    options.group_of[4] = GroupOptions::kNoGroup;
    test.session().update(options, 1.0);
    test.session().finish_step();
  }
  EXPECT_TRUE(same_bits(test.param(4), before[4]));
  EXPECT_FALSE(same_bits(test.param(5), before[5]));
}

TEST(SessionStepTest, TiedWeightsGetTheGradientsOfBothLayers) {
  TestModel model = small();
  model.layers[3].weight = model.layers[0].weight;
  model.params.erase(model.params.begin() + 6);
  model.layers[3].bias = 6;
  model.trained.pop_back();
  model.types.pop_back();
  Reference reference(model.copy(), adam(), adam_options());
  const TestSession test(model);
  for (std::uint64_t step = 0; step < 3; ++step) {
    test.run(batch(kWidth, step));
    reference.run(batch(kWidth, step));
    test.step();
    reference.step();
  }
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, ALayerThatRunsTwiceAddsBothGradients) {
  TestModel model = small();
  model.layers[2] = model.layers[1];
  Reference reference(model.copy(), adam(), adam_options());
  const TestSession test(model, {.overlap = Overlap::kBackward});
  test.arm();
  test.run(batch(kWidth, 1));
  reference.run(batch(kWidth, 1));
  test.step();
  reference.step();
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, AnAliasOfAParameterFollowsTheUpdate) {
  const TestSession test(small());
  const at::Tensor alias = test.param(0).detach();
  const at::Tensor view = test.param(0).view({-1}).detach();
  test.run(batch(kWidth, 1));
  test.step();
  EXPECT_TRUE(same_bits(alias, test.param(0)));
  EXPECT_TRUE(same_bits(view, test.param(0).detach().reshape({-1})));
}

TEST(SessionStepTest, AnUpdateCountsAsAWriteOfTheParameter) {
  const TestSession test(small());
  const at::Tensor input =
      batch(kWidth, 1).set_requires_grad(true);  // its gradient needs the weights
  const at::Tensor loss = loss_of(test.forward(input));
  loss.backward({}, /*retain_graph=*/true);
  test.step();
  EXPECT_THROW(loss.backward(), c10::Error) << "the graph saved weights that are no more";
}

TEST(SessionStepTest, InferenceLeavesNoGradientAndNoStep) {
  const TestSession test(small());
  const at::NoGradGuard no_grad;
  const at::Tensor input = batch(kWidth, 1);
  const at::Tensor output = test.forward(input);
  EXPECT_TRUE(same_bits(output, small().forward(input)));
  EXPECT_FALSE(test.param(0).grad().defined());
  EXPECT_EQ(test.session().runtime().counts().steps, 0U);
}

TEST(SessionStepTest, AParameterThatWasFrozenIsRefusedAtTheNextForwardOnceItTrains) {
  const TestSession test(small().freeze(2));
  test.param(2).set_requires_grad(true);
  expect_thrown<UsageError>([&] { (void)test.forward(batch(kWidth, 1)); }, "parameter 'p2'");
  test.param(2).set_requires_grad(false);
  EXPECT_NO_THROW((void)test.run(batch(kWidth, 1)));
}

TEST(SessionStepTest, AParameterThatIsFrozenForAStepStaysAsItIs) {
  const TestSession test(small());
  const at::Tensor before = test.param(2).detach().clone();
  test.param(2).set_requires_grad(false);
  test.run(batch(kWidth, 1));
  test.step();
  EXPECT_TRUE(same_bits(test.param(2).detach(), before));
  test.param(2).set_requires_grad(true);
  test.run(batch(kWidth, 2));
  test.step();
  EXPECT_FALSE(same_bits(test.param(2).detach(), before));
}

TEST(SessionStepTest, BackwardUpdatesWhatItHasCompletedAndRefusesReadersBeforeTheStep) {
  const TestSession test(small(), {.overlap = Overlap::kBackward});
  test.arm();
  test.run(batch(kWidth, 1));
  expect_thrown<UsageError>([&] { test.session().move_to_host(); }, "step()");
  expect_thrown<UsageError>([&] { (void)test.forward(batch(kWidth, 2)); },
                            "the next forward began");
  EXPECT_THROW(test.run(batch(kWidth, 1)), UsageError);
  test.step();
  EXPECT_NO_THROW(test.session().move_to_host());
}

TEST(SessionStepTest, AStepWithOtherOptionsThanBackwardsIsRefused) {
  const TestSession test(small(), {.overlap = Overlap::kBackward});
  test.arm();
  test.run(batch(kWidth, 1));
  const Session::Turn turn(test.shared(), PassTurn::Section::kPlain, "an optimizer.step()");
  (void)test.collect(false);
  GroupOptions other = test.group_options();
  other.groups[0][0] = 0.5;
  EXPECT_THROW(test.session().update(other, 1.0), UsageError);
  EXPECT_NO_THROW(test.session().update(test.group_options(), 1.0));
  test.session().finish_step();
}

TEST(SessionStepTest, TheSecondStepRunsByThePlanOfTheFirst) {
  const TestSession test(TestModel::layers_of(8, kWidth),
                         {.device_bytes = 24 << 10, .policy = PlacementPolicy::kAuto});
  for (std::uint64_t step = 0; step < 3; ++step) {
    test.run(batch(kWidth, step));
    test.step();
  }
  const RuntimeCounts counts = test.session().runtime().counts();
  EXPECT_EQ(counts.steps, 3U);
  EXPECT_EQ(counts.divergent_steps, 0U);
  EXPECT_GT(counts.prefetch_hits, 0U);
  EXPECT_TRUE(test.session().runtime().trace());
}

TEST(SessionStepTest, ResidentChunksStayOnTheDeviceAndTrainTheSame) {
  Reference reference(small().copy(), adam(), adam_options());
  const TestSession test(small(), {.policy = PlacementPolicy::kAuto});
  for (std::uint64_t step = 0; step < 4; ++step) {
    test.run(batch(kWidth, step));
    reference.run(batch(kWidth, step));
    test.step();
    reference.step();
  }
  EXPECT_GT(test.session().runtime().counts().resident_chunks, 0U);
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, PlacementOnTheDeviceKeepsAllThereAndTrainsTheSame) {
  Reference reference(small().copy(), adam(), adam_options());
  const TestSession test(small(), {.policy = PlacementPolicy::kCuda});
  for (std::uint64_t step = 0; step < 2; ++step) {
    test.run(batch(kWidth, step));
    reference.run(batch(kWidth, step));
    test.step();
    reference.step();
  }
  EXPECT_EQ(test.session().chunks().manager().payload(test.chunk_of(0), PayloadKind::kGrad)->tier(),
            TierKind::kDevice);
  EXPECT_EQ(test.session().runtime().transfers().h2d_bytes, 0U);
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, MoveToHostEmptiesTheSlots) {
  const TestSession test(small());
  test.run(batch(kWidth, 1));
  test.step();
  (void)test.forward(batch(kWidth, 2));
  EXPECT_GT(test.device_used(), 0U);
  test.session().move_to_host();
  const auto& payload =
      test.session().chunks().manager().payload(test.chunk_of(0), PayloadKind::kParam);
  EXPECT_EQ(test.param(0).const_data_ptr(), payload->data());
}

TEST(SessionStepTest, AWriteOnTheDeviceInMidPassReachesTheHostAndTheMaster) {
  TestModel model = small().typed(ScalarType::kBFloat16);
  const TestSession test(model,
                         {.rule = adam(StateFormat::kSplit), .precision = ScalarType::kBFloat16});
  (void)test.forward(batch(kWidth, 1, at::kBFloat16), [&](std::size_t layer) {
    if (layer == 1) {
      const at::NoGradGuard no_grad;
      test.param(2).mul_(2);
    }
  });
  const at::Tensor doubled = test.param(2).detach().clone();
  test.session().move_to_host();
  EXPECT_TRUE(same_bits(test.param(2), doubled));
  EXPECT_TRUE(
      same_bits(*test.session().optimizer_state().master(param_id(2)), doubled.to(at::kFloat)))
      << "what was written is its own master";
}

TEST(SessionStepTest, ALoadForgetsAStepThatStoppedInTheMiddle) {
  const TestSession test(small(), {.overlap = Overlap::kBackward});
  test.arm();
  test.run(batch(kWidth, 1));
  const RunLoad load{.weights = LoadedWeights::kAll, .states = true};
  test.session().begin_load(load);
  EXPECT_FALSE(test.session().consistent());
  expect_thrown<UsageError>([&] { (void)test.forward(batch(kWidth, 1)); }, "load");
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 2 * kLayers; ++i) {
      test.session().optimizer_state().adopt(param_id(i), small().params[i]);
    }
    test.session().optimizer_state().zero();
    test.session().steps().zero_();
  }
  test.session().end_load(load);
  test.session().updates().share_weights();
  EXPECT_TRUE(test.session().consistent());
  test.zero_grad();
  Reference reference(small().copy(), adam(), adam_options());
  test.arm();
  test.run(batch(kWidth, 2));
  reference.run(batch(kWidth, 2));
  test.step();
  reference.step();
  expect_same_bits(test.values(), reference.model().params);
}

TEST(SessionStepTest, AModelThatEndsInMidStepLeavesItsParametersReadable) {
  TestModel model = small();
  const std::vector<at::Tensor> before = model.values();
  at::Tensor output;
  {
    TestSession test(model);
    output = test.forward(batch(kWidth, 1));
  }
  expect_same_bits(model.params, before);
  EXPECT_NO_THROW(loss_of(output).backward()) << "the graph outlives the session";
}

}  // namespace
}  // namespace castor::testing
