#include "core/activation_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "core/error.h"

namespace castor {
namespace {

using enum EventKind;

/// Two blocks of two modules each (1, 2 and 3, 4), both run again in backward. A block's first
/// module leaves 30 bytes, its second 40, of which the second forward stops before the exit.
RecordedStep recomputed() {
  RecordedStep step;
  const auto add = [&step](EventKind kind, std::uint32_t id, std::uint64_t bytes, double seconds) {
    step.events.push_back({kind, id, bytes, step.events.size() * 10});
    step.compute_seconds.push_back(seconds);
  };
  add(kForwardEnter, 1, 25, 1.0);    // 0
  add(kForwardExit, 1, 10, 0.0);     // 1
  add(kForwardEnter, 2, 30, 2.0);    // 2
  add(kForwardExit, 2, 20, 0.5);     // 3
  add(kForwardEnter, 3, 35, 1.0);    // 4
  add(kForwardExit, 3, 20, 0.0);     // 5
  add(kForwardEnter, 4, 40, 2.0);    // 6
  add(kForwardExit, 4, 30, 3.0);     // 7: and the loss
  add(kBackwardEnter, 4, 32, 0.25);  // 8: asks for the second forward of 3, 4
  add(kForwardEnter, 3, 65, 1.0);    // 9
  add(kForwardExit, 3, 62, 0.0);     // 10
  add(kForwardEnter, 4, 110, 4.0);   // 11: and goes on with backward
  add(kBackwardEnter, 3, 80, 2.0);   // 12
  add(kGradReady, 1, 22, 0.0);       // 13
  add(kBackwardEnter, 2, 21, 0.25);  // 14
  add(kForwardEnter, 1, 55, 1.0);    // 15
  add(kForwardExit, 1, 52, 0.0);     // 16
  add(kForwardEnter, 2, 99, 4.0);    // 17
  add(kBackwardEnter, 1, 70, 2.0);   // 18
  return step;
}

const RecomputedSpan kFirst{.forward_begin = 0,
                            .forward_end = 4,
                            .again_begin = 15,
                            .again_end = 18,
                            .forward_base = 10,
                            .again_base = 20,
                            .kept_bytes = 70};
const RecomputedSpan kSecond{.forward_begin = 4,
                             .forward_end = 8,
                             .again_begin = 9,
                             .again_end = 12,
                             .forward_base = 20,
                             .again_base = 30,
                             .kept_bytes = 70};

std::vector<std::pair<EventKind, std::uint32_t>> sequence(const RecordedStep& step) {
  std::vector<std::pair<EventKind, std::uint32_t>> found;
  for (const Event& event : step.events) {
    found.emplace_back(event.kind, event.id);
  }
  return found;
}

std::vector<std::uint64_t> bytes(const RecordedStep& step) {
  std::vector<std::uint64_t> found;
  for (const Event& event : step.events) {
    found.push_back(event.nonmodel_bytes);
  }
  return found;
}

TEST(ActivationPlanTest, NothingKeptIsTheStepAsItWas) {
  const RecordedStep step = recomputed();
  const RecordedStep same = keep_activations(step, {});
  EXPECT_EQ(sequence(same), sequence(step));
  EXPECT_EQ(bytes(same), bytes(step));
  EXPECT_EQ(same.compute_seconds, step.compute_seconds);
  EXPECT_EQ(same.events.back().time_ns, step.events.back().time_ns);
}

TEST(ActivationPlanTest, WhatIsKeptIsNotRunAgain) {
  const RecordedStep step = keep_activations(recomputed(), std::vector{kSecond});
  const std::vector<std::pair<EventKind, std::uint32_t>> expected{
      {kForwardEnter, 1},  {kForwardExit, 1},   {kForwardEnter, 2}, {kForwardExit, 2},
      {kForwardEnter, 3},  {kForwardExit, 3},   {kForwardEnter, 4}, {kForwardExit, 4},
      {kBackwardEnter, 4}, {kBackwardEnter, 3}, {kGradReady, 1},    {kBackwardEnter, 2},
      {kForwardEnter, 1},  {kForwardExit, 1},   {kForwardEnter, 2}, {kBackwardEnter, 1}};
  EXPECT_EQ(sequence(step), expected);
  EXPECT_EQ(step.compute_seconds, (std::vector<double>{1.0, 0.0, 2.0, 0.5, 1.0, 0.0, 2.0, 3.0, 4.25,
                                                       2.0, 0.0, 0.25, 1.0, 0.0, 4.0, 2.0}));
  EXPECT_EQ(step.events.back().time_ns, 180u - 30u) << "the second forward took three moments";
}

TEST(ActivationPlanTest, BytesGrowInTheFirstForwardAndStayUntilBackward) {
  const RecordedStep step = keep_activations(recomputed(), std::vector{kSecond});
  // 35 above a base of 30 instead of 15 above 20; 32 instead of 0; then all 70.
  EXPECT_EQ(bytes(step), (std::vector<std::uint64_t>{25, 10, 30, 20, 55, 52, 110, 100, 110, 80, 22,
                                                     21, 55, 52, 99, 70}));
}

TEST(ActivationPlanTest, BlocksAddUp) {
  const RecordedStep step = keep_activations(recomputed(), std::vector{kFirst, kSecond});
  EXPECT_EQ(bytes(step), (std::vector<std::uint64_t>{45, 42, 100, 90, 125, 122, 180, 170, 180, 150,
                                                     92, 99, 70}));
  EXPECT_EQ(step.events.size(), 13u);
}

TEST(ActivationPlanTest, WhatIsAwayIsNotOnTheDevice) {
  RecomputedSpan away = kFirst;
  away.away_begin = 6;
  away.away_end = 12;
  away.input_bytes = 5;
  // As with both blocks kept, but without the 70 and the 5 from the second block's second module to
  // the moment before its backward is over.
  const RecordedStep step = keep_activations(recomputed(), std::vector{away, kSecond});
  EXPECT_EQ(bytes(step),
            (std::vector<std::uint64_t>{45, 42, 100, 90, 125, 122, 105, 95, 105, 150, 92, 99, 70}));
  away.away_end = 16;
  EXPECT_THROW(static_cast<void>(keep_activations(recomputed(), std::vector{away})),
               InvalidArgument)
      << "it is away when backward needs it";
}

TEST(ActivationPlanTest, ABlockWhoseSecondForwardEntersNoModule) {
  const RecomputedSpan quiet{.forward_begin = 4,
                             .forward_end = 4,
                             .again_begin = 9,
                             .again_end = 9,
                             .forward_base = 0,
                             .again_base = 0,
                             .kept_bytes = 5};
  const RecordedStep step = keep_activations(recomputed(), std::vector{quiet});
  EXPECT_EQ(sequence(step), sequence(recomputed()));
  EXPECT_EQ(step.events[3].nonmodel_bytes, 20u);
  EXPECT_EQ(step.events[4].nonmodel_bytes, 40u);
  EXPECT_EQ(step.events[8].nonmodel_bytes, 37u);
  EXPECT_EQ(step.events[9].nonmodel_bytes, 65u);
}

TEST(ActivationPlanTest, SpansThatAreNoneAreRefused) {
  const RecordedStep step = recomputed();
  RecomputedSpan late = kSecond;
  late.again_end = 20;
  EXPECT_THROW(static_cast<void>(keep_activations(step, std::vector{late})), InvalidArgument);
  RecomputedSpan reversed = kSecond;
  std::swap(reversed.forward_end, reversed.again_begin);
  EXPECT_THROW(static_cast<void>(keep_activations(step, std::vector{reversed})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(keep_activations(step, std::vector{kSecond, kSecond})),
               InvalidArgument);
  RecordedStep untimed = step;
  untimed.compute_seconds.pop_back();
  EXPECT_THROW(static_cast<void>(keep_activations(untimed, {})), InvalidArgument);
}

}  // namespace
}  // namespace castor
