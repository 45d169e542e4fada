#include "store/session_plan.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "store/errors.h"
#include "store/fake_device.h"
#include "store/small_model.h"

namespace castor::testing {
namespace {

SessionOptions options(Computes computes = Computes::kOnHost) {
  SessionOptions made;
  made.backend = std::make_shared<FakeDevice>(computes);
  made.budgets = std::make_shared<SharedBudgets>(kGiB, kGiB, kMiB);
  made.layout.chunk_bytes = 4096;
  made.state.rule = adam();
  return made;
}

SessionPlan plan(const SessionOptions& given) {
  return plan_session(SmallModel::row(2, 16).params, {true, false}, {}, given);
}

TEST(SessionPlanTest, ParametersAreTrainedRuledAndReadByTheRowAsTheirMarksSay) {
  SessionOptions given = options();
  given.by_row = {false, true};
  const SessionPlan made = plan(given);
  EXPECT_TRUE(made.layout.param(param_id(0)).trainable);
  EXPECT_FALSE(made.layout.param(param_id(1)).trainable);
  EXPECT_TRUE(made.layout.param(param_id(1)).by_row);
  EXPECT_EQ(made.placements.size(), made.layout.chunks().size());
  given.state.ruled = {false, true};
  EXPECT_FALSE(plan(given).layout.param(param_id(0)).has_state);
}

TEST(SessionPlanTest, NvmeHasWhatOtherModelsHaveLeft) {
  SessionOptions given = options();
  given.state.nvme = NvmeOptions{.directories = {"/"}, .budget_bytes = 3};
  Ledger other(given.budgets->nvme(), "other");
  const Reservation taken = other.reserve(kMiB / 4, "");
  EXPECT_EQ(plan(given).options.state.nvme->budget_bytes, kMiB - kMiB / 4);
}

TEST(SessionPlanTest, ADeviceWithoutKernelsForTheRuleIsRefused) {
  SessionOptions given = options(Computes::kByItself);
  EXPECT_NO_THROW((void)plan(given));
  given.state.rule = make_update_rule("lion", StateFormat::kFp32);
  expect_thrown<InvalidArgument>([&] { (void)plan(given); },
                                 "no kernels for the optimizer 'lion'; use device=\"cpu\"");
}

TEST(SessionPlanTest, NumbersThatDifferAreNamed) {
  EXPECT_NO_THROW(check_counts({.params = 2, .names = 2, .trained = 2, .types = 2}));
  expect_thrown<InvalidArgument>(
      [] { check_counts({.params = 2, .names = 3, .trained = 1, .types = 2}); },
      "there are 2 parameters but 3 names and 1 marks of what is trained");
  EXPECT_THROW(check_counts({.params = 2, .names = 2, .trained = 2, .types = 1}), InvalidArgument);
}

}  // namespace
}  // namespace castor::testing
