#include "store/run_integrity.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "store/errors.h"

namespace castor::testing {
namespace {

constexpr RunLoad kWeightsAlone{.weights = LoadedWeights::kSome, .states = false};
constexpr RunLoad kStatesAlone{.weights = LoadedWeights::kNone, .states = true};
constexpr RunLoad kAll{.weights = LoadedWeights::kAll, .states = true};

TEST(RunIntegrityTest, ANewRunIsConsistent) {
  const RunIntegrity run;
  EXPECT_TRUE(run.consistent());
  run.check();
}

TEST(RunIntegrityTest, ABrokenRunSaysWhy) {
  RunIntegrity run;
  run.broke("step 3 failed");
  EXPECT_FALSE(run.consistent());
  expect_thrown<UsageError>([&] { run.check(); },
                            "and cannot be saved: step 3 failed. Weights and optimizer states "
                            "belong to no single step");
}

TEST(RunIntegrityTest, TheFirstReasonIsTheCause) {
  RunIntegrity run;
  run.broke("the disk failed");
  run.broke("another rank has ended");
  run.loading(kAll);
  expect_thrown<UsageError>([&] { run.check(); }, "the disk failed");
}

TEST(RunIntegrityTest, ALoadThatHasNotEndedLosesWhatItReplaces) {
  RunIntegrity weights;
  weights.loading(kWeightsAlone);
  expect_thrown<UsageError>([&] { weights.check(); },
                            "a load of the weights did not come to its end. The weights belong");
  RunIntegrity states;
  states.loading(kStatesAlone);
  expect_thrown<UsageError>(
      [&] { states.check(); },
      "a load of the optimizer states did not come to its end. The optimizer states belong");
}

TEST(RunIntegrityTest, ALoadThatHasEndedIsConsistent) {
  RunIntegrity run;
  run.loading(kAll);
  EXPECT_FALSE(run.consistent());
  run.loaded(kAll);
  EXPECT_TRUE(run.consistent());
}

TEST(RunIntegrityTest, ABrokenRunNeedsWeightsAndStates) {
  RunIntegrity run;
  run.broke("step 3 failed");
  run.loading(kWeightsAlone);
  run.loaded(kWeightsAlone);
  expect_thrown<UsageError>([&] { run.check(); }, "step 3 failed. The optimizer states belong");
  run.loading(kStatesAlone);
  run.loaded(kStatesAlone);
  EXPECT_TRUE(run.consistent());
}

TEST(RunIntegrityTest, ALoadOfNothingChangesNothing) {
  RunIntegrity run;
  run.loading({});
  EXPECT_TRUE(run.consistent());
  run.broke("step 3 failed");
  run.loaded({});
  EXPECT_FALSE(run.consistent());
}

TEST(RunIntegrityTest, EveryBreakIsReportedOutsideOfTheMutex) {
  RunIntegrity run;
  int reports = 0;
  run.when_broken([&] {
    ++reports;
    EXPECT_FALSE(run.consistent());  // takes the mutex
  });
  run.broke("once");
  run.broke("twice");
  run.loading(kAll);
  EXPECT_EQ(reports, 2);
}

TEST(RunIntegrityTest, ThreadsThatBreakARunAgreeOnOneReason) {
  RunIntegrity run;
  std::atomic<int> reports = 0;
  run.when_broken([&] { ++reports; });
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&run, i] { run.broke("thread " + std::to_string(i)); });
    }
  }
  EXPECT_EQ(reports, 4);
  const std::string first = thrown<UsageError>([&] { run.check(); })->what();
  EXPECT_EQ(first, thrown<UsageError>([&] { run.check(); })->what());
}

}  // namespace
}  // namespace castor::testing
