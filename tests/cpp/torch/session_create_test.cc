// Boosting a model: what becomes of its parameters, what is refused, and that a refusal touches
// nothing.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/errors.h"
#include "torch/chunk_storages.h"
#include "torch/cpu_backend.h"
#include "torch/test_session.h"

namespace castor::testing {
namespace {

constexpr std::int64_t kWidth = 16;

/// Memory and values of parameters, to compare with later.
struct Before {
  explicit Before(const TestModel& model) : params(model.params), values(model.values()) {
    for (const at::Tensor& param : params) {
      addresses.push_back(param.const_data_ptr());
    }
  }
  void expect_untouched() const {
    for (std::size_t i = 0; i < params.size(); ++i) {
      EXPECT_EQ(params[i].const_data_ptr(), addresses[i]) << "parameter " << i;
    }
    expect_same_bits(params, values);
  }
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> values;
  std::vector<const void*> addresses;
};

/// Kernels of a device that knows no update rule.
class NoKernels final : public DeviceKernels {
 public:
  [[nodiscard]] bool has(std::string_view /*rule*/) const noexcept override { return false; }
  void update(const UpdateRule& /*rule*/, std::span<const UpdateSegment> /*segments*/,
              StreamId /*stream*/) override {}
  void square_norms(std::span<const NormSegment> /*segments*/, std::span<double> /*sums*/,
                    StreamId /*stream*/) override {}
  void average(void* /*mean*/, const void* /*parts*/, std::size_t /*count*/, std::size_t /*numel*/,
               ScalarType /*type*/, StreamId /*stream*/) override {}
};

/// The CPU device, with kernels.
class DeviceWithoutRules final : public DeviceBackend {
 public:
  [[nodiscard]] DeviceId device() const noexcept override { return cpu_->device(); }
  [[nodiscard]] DeviceKernels* kernels() noexcept override { return &kernels_; }
  [[nodiscard]] std::unique_ptr<CopyEngine> make_copy_engine() override {
    return cpu_->make_copy_engine();
  }
  [[nodiscard]] std::unique_ptr<Arena> make_device_arena() override {
    return cpu_->make_device_arena();
  }
  [[nodiscard]] std::unique_ptr<Arena> make_host_arena() override {
    return cpu_->make_host_arena();
  }
  void follow(const std::shared_ptr<DeviceAccount>& /*account*/) override {}

 private:
  const std::shared_ptr<DeviceBackend> cpu_ = make_cpu_backend(0);
  NoKernels kernels_;
};

TEST(SessionCreateTest, EachParameterBecomesAViewOfItsPlaceInAChunk) {
  const TestModel model = TestModel::layers_of(3, kWidth);
  const Before before(model);
  const auto session = create_session(model, {});
  expect_same_bits(model.params, before.values);
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    const ParamPlace place = session->layout().place(param_id(i));
    const auto& payload = session->chunks().manager().payload(place.chunk, PayloadKind::kParam);
    EXPECT_EQ(model.params[i].const_data_ptr(), payload->data() + 4 * place.offset);
    EXPECT_EQ(model.params[i].storage().nbytes(), model.params[i].nbytes())
        << "a saver that takes the storage takes more than the parameter";
    EXPECT_TRUE(model.params[i].is_leaf() && model.params[i].requires_grad());
    EXPECT_FALSE(model.params[i].grad().defined());
  }
}

TEST(SessionCreateTest, ShortHostMemoryIsRefusedAndTouchesNoParameter) {
  const TestModel model = TestModel::layers_of(3, kWidth);
  const Before before(model);
  const auto budgets = std::make_shared<SharedBudgets>(1 << 24, 10'000, 1 << 20);
  const auto error =
      thrown<OutOfMemory>([&] { (void)create_session(model, {.budgets = budgets}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->tier(), TierKind::kHost);
  EXPECT_EQ(error->budget(), 10'000U);
  before.expect_untouched();
  EXPECT_EQ(budgets->host()->used(), 0U);
  EXPECT_EQ(budgets->device()->used(), 0U);
  EXPECT_EQ(budgets->num_models(), 0U);
}

TEST(SessionCreateTest, ADeviceSmallerThanAModuleIsRefusedByTheModulesName) {
  const TestModel model = TestModel::layers_of(2, kWidth);
  const Before before(model);
  expect_thrown<OutOfMemory>([&] { (void)create_session(model, {.device_bytes = 512}); }, "layer0");
  before.expect_untouched();
}

TEST(SessionCreateTest, AModelFitsExactlyTheHostBytesThatItTakes) {
  const TestModel model = TestModel::layers_of(3, kWidth);
  const auto budgets = std::make_shared<SharedBudgets>(1 << 24, 1 << 26, 1 << 20);
  std::size_t taken = 0;
  {
    const auto session = create_session(model.copy(), {.budgets = budgets});
    taken = session->memory().host_tier()->ledger().used();
  }
  const Before before(model);
  EXPECT_THROW((void)create_session(model, {.host_bytes = taken - 1}), OutOfMemory);
  before.expect_untouched();
  EXPECT_NO_THROW((void)create_session(model, {.host_bytes = taken}));
}

TEST(SessionCreateTest, AsManyNamesMarksAndTypesAsParametersAreAskedFor) {
  const TestModel model = TestModel::layers_of(1, kWidth);
  const auto create = [&](std::vector<std::string> names, const std::vector<bool>& trained,
                          const std::vector<std::optional<ScalarType>>& types) {
    (void)Session::create(model.params, std::move(names), trained, types, model.modules(),
                          session_options({}), {});
  };
  expect_thrown<InvalidArgument>([&] { create({"p0"}, model.trained, model.types); },
                                 "2 parameters but 1 names");
  expect_thrown<InvalidArgument>([&] { create(model.names(), {true}, model.types); },
                                 "2 names and 1 marks");
  EXPECT_THROW(create(model.names(), model.trained, {std::nullopt}), InvalidArgument);
}

TEST(SessionCreateTest, ElementsThatNoChunkHoldsAreRefused) {
  TestModel model = TestModel::layers_of(1, kWidth);
  model.params[1] = model.params[1].detach().to(at::kDouble).set_requires_grad(true);
  const Before before(model);
  expect_thrown<InvalidArgument>([&] { (void)create_session(model, {}); }, "Double");
  before.expect_untouched();
}

TEST(SessionCreateTest, ADeviceWithoutTheRulesKernelsIsRefused) {
  const TestModel model = TestModel::layers_of(1, kWidth);
  const Before before(model);
  expect_thrown<InvalidArgument>(
      [&] { (void)create_session(model, {.backend = std::make_shared<DeviceWithoutRules>()}); },
      "no kernels for the optimizer 'adam'");
  before.expect_untouched();
}

TEST(SessionCreateTest, AParameterOf16BitsIsRoundedAndItsMasterIsExact) {
  TestModel model = TestModel::layers_of(2, kWidth).typed(ScalarType::kBFloat16);
  const std::vector<at::Tensor> exact = model.values();
  const TestSession test(model, {.precision = ScalarType::kBFloat16});
  for (std::size_t i = 0; i < exact.size(); ++i) {
    EXPECT_TRUE(same_bits(test.param(i), exact[i].to(at::kBFloat16)));
    EXPECT_TRUE(same_bits(*test.session().optimizer_state().master(param_id(i)), exact[i]));
  }
}

TEST(SessionCreateTest, PackedBytesKeepTheirBytes) {
  TestModel model = TestModel::layers_of(1, kWidth);
  model.params.push_back(at::arange(200, at::kByte));
  model.trained.push_back(false);
  model.types.emplace_back(std::nullopt);
  const auto session = create_session(model, {});
  EXPECT_TRUE(same_bits(model.params[2], at::arange(200, at::kByte)));
  EXPECT_EQ(session->layout().param(param_id(2)).type, ScalarType::kUInt8);
}

TEST(SessionCreateTest, ATensorOverAParametersMemoryGoesWithItIntoTheChunk) {
  const TestModel model = TestModel::layers_of(2, kWidth);
  const at::Tensor alias = model.params[0].detach();  // a state_dict's entry
  const auto session = create_session(model, {});
  EXPECT_EQ(alias.const_data_ptr(), model.params[0].const_data_ptr());
  const at::NoGradGuard no_grad;
  alias.fill_(7);
  EXPECT_TRUE(same_bits(model.params[0], at::full({kWidth, kWidth}, 7.0F)));
}

TEST(SessionCreateTest, AStridedParameterKeepsItsStrides) {
  TestModel model = TestModel::layers_of(1, kWidth);
  const at::Tensor values = at::rand({kWidth, kWidth});
  model.params[0] = values.t().clone(at::MemoryFormat::Preserve).set_requires_grad(true);
  const auto session = create_session(model, {});
  EXPECT_EQ(model.params[0].strides(), at::IntArrayRef({1, kWidth}));
  EXPECT_TRUE(same_bits(model.params[0], values.t()));
}

TEST(SessionCreateTest, AValuelessParameterTakesWhatItIsGivenLater) {
  const TestModel model = TestModel::layers_of(2, kWidth);
  const TestSession test(model, {.valueless = {param_id(1)}});
  const at::Tensor values = at::arange(kWidth, at::kFloat);
  test.session().optimizer_state().adopt(param_id(1), values);
  EXPECT_TRUE(same_bits(test.param(1), values));
}

TEST(SessionCreateTest, ParametersOutliveTheirSessionInMemoryOfTheirOwn) {
  const auto budgets = std::make_shared<SharedBudgets>(1 << 24, 1 << 26, 1 << 20);
  TestModel model = TestModel::layers_of(3, kWidth);
  const std::vector<at::Tensor> values = model.values();
  auto session = create_session(model, {.budgets = budgets});
  EXPECT_GT(budgets->host()->used(), 0U);
  session.reset();
  EXPECT_EQ(budgets->host()->used(), 0U);
  EXPECT_EQ(budgets->device()->used(), 0U);
  expect_same_bits(model.params, values);
  const at::NoGradGuard no_grad;
  model.params[0].add_(1);
  EXPECT_TRUE(same_bits(model.params[0], values[0] + 1));
}

TEST(SessionCreateTest, ASecondModelOfTheBudgetsIsRefusedUntilTheFirstHasGone) {
  std::size_t taken = 0;
  {
    const auto alone = create_session(TestModel::layers_of(3, kWidth), {});
    taken = alone->memory().host_tier()->ledger().used();
  }
  const auto budgets = std::make_shared<SharedBudgets>(1 << 24, taken + 100, 1 << 20);
  auto first = create_session(TestModel::layers_of(3, kWidth), {.budgets = budgets, .name = "A"});
  const TestModel model = TestModel::layers_of(3, kWidth, 2);
  const Before before(model);
  expect_thrown<OutOfMemory>(
      [&] { (void)create_session(model, {.budgets = budgets, .name = "B"}); }, "A");
  before.expect_untouched();
  first.reset();
  EXPECT_NO_THROW((void)create_session(model, {.budgets = budgets, .name = "B"}));
}

TEST(SessionCreateTest, ContentsAreNamedByTheirStorages) {
  const TestModel model = TestModel::layers_of(1, kWidth);
  const TestSession test(model);
  test.run(batch(kWidth, 1));
  const auto content = [&](const at::Tensor& tensor) {
    return test.session().content_of(tensor.storage().unsafeGetStorageImpl());
  };
  EXPECT_EQ(content(test.param(0)), "parameter 'p0'");
  EXPECT_EQ(content(test.param(1).grad()), "the gradient of parameter 'p1'");
  EXPECT_EQ(content(test.session().states(param_id(0))[1]), "an optimizer state of parameter 'p0'");
  EXPECT_EQ(content(at::zeros({3})), "");
}

TEST(SessionCreateTest, AForkedChildIsToldThatTheMemoryIsItsParents) {
  const TestSession test(TestModel::layers_of(1, kWidth));
  test.session().stay_with_parent();
  expect_thrown<UsageError>([&] { test.enter(0); }, "forked");
  expect_thrown<UsageError>([&] { test.session().settle(); }, "forked");
  expect_thrown<UsageError>(
      [&] { const Session::Turn turn(test.shared(), PassTurn::Section::kPlain, "a save"); },
      "forked");
  EXPECT_THROW((void)test.param(0).const_data_ptr(), c10::Error);
  EXPECT_NO_THROW(test.session().exit(module_id(0)));
}

}  // namespace
}  // namespace castor::testing
