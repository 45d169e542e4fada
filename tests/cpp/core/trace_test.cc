#include "core/trace.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/error.h"

namespace castor {
namespace {

using enum EventKind;

TEST(TraceTest, EmptyTraceHasNoAccesses) {
  const Trace trace(std::vector<Event>{});
  EXPECT_EQ(trace.num_accesses(), 0u);
  EXPECT_EQ(trace.peak_nonmodel_bytes(), 0u);
}

TEST(TraceTest, CountsEntersOnly) {
  const Trace trace({{kForwardEnter, 1, 10, 0},
                     {kForwardExit, 1, 30, 1},
                     {kBackwardEnter, 1, 20, 2},
                     {kGradReady, 0, 5, 3}});
  EXPECT_EQ(trace.num_accesses(), 2u);
  EXPECT_EQ(trace.peak_nonmodel_bytes(), 30u);
}

TEST(TraceTest, SignatureIsOfTheAccessesInOrder) {
  const Trace base({{kForwardEnter, 1, 0, 0}, {kForwardEnter, 2, 0, 0}});
  const Trace same({{kForwardEnter, 1, 7, 9},
                    {kForwardExit, 1, 0, 0},
                    {kForwardEnter, 2, 0, 0},
                    {kGradReady, 5, 0, 0}});
  EXPECT_EQ(base.signature(), same.signature()) << "bytes, times, exits and gradients do not count";
  const Trace swapped({{kForwardEnter, 2, 0, 0}, {kForwardEnter, 1, 0, 0}});
  const Trace backward({{kForwardEnter, 1, 0, 0}, {kBackwardEnter, 2, 0, 0}});
  const Trace shorter({{kForwardEnter, 1, 0, 0}});
  EXPECT_NE(base.signature(), swapped.signature());
  EXPECT_NE(base.signature(), backward.signature());
  EXPECT_NE(base.signature(), shorter.signature());
}

TEST(TraceTest, MergingKeepsTheLargerCurve) {
  const Trace first({{kForwardEnter, 1, 10, 0}, {kForwardEnter, 2, 50, 4}});
  const Trace second({{kForwardEnter, 1, 20, 0}, {kForwardEnter, 2, 40, 8}});
  const Trace merged = first.merged_with(second);
  EXPECT_EQ(merged.events()[0].nonmodel_bytes, 20u);
  EXPECT_EQ(merged.events()[1].nonmodel_bytes, 50u);
  EXPECT_EQ(merged.events()[1].time_ns, 8u) << "the argument's times";
  EXPECT_EQ(merged.signature(), first.signature());
  EXPECT_THROW((void)first.merged_with(Trace()), InvalidArgument);
}

TEST(TracerTest, PeaksBelongToTheEventBefore) {
  Tracer tracer;
  EXPECT_TRUE(tracer.empty());
  tracer.record(kForwardEnter, 3, 999, 1000);  // before the first moment: nobody's
  tracer.record(kForwardExit, 3, 11, 1500);
  tracer.record(kBackwardEnter, 3, 22, 1700);
  EXPECT_FALSE(tracer.empty());
  const Trace trace = tracer.finish(33);
  ASSERT_EQ(trace.events().size(), 3u);
  EXPECT_EQ(trace.events()[0].nonmodel_bytes, 11u);
  EXPECT_EQ(trace.events()[1].nonmodel_bytes, 22u);
  EXPECT_EQ(trace.events()[2].nonmodel_bytes, 33u);
  EXPECT_EQ(trace.events()[0].time_ns, 0u);
  EXPECT_EQ(trace.events()[2].time_ns, 700u);
  EXPECT_EQ(trace.events()[2].id, 3u);
}

TEST(TracerTest, FinishStartsOver) {
  Tracer tracer;
  tracer.record(kForwardEnter, 1, 0, 50);
  (void)tracer.finish(0);
  EXPECT_TRUE(tracer.empty());
  EXPECT_EQ(tracer.finish(5).events().size(), 0u);
  tracer.record(kForwardEnter, 1, 0, 80);
  EXPECT_EQ(tracer.finish(0).events()[0].time_ns, 0u);
}

TEST(TracerTest, StopsAtItsLimit) {
  Tracer tracer;
  for (std::size_t i = 0; i < Tracer::kMaxEvents - 1; ++i) {
    tracer.record(kGradReady, 0, 0, 0);
  }
  EXPECT_TRUE(tracer.complete());
  tracer.record(kForwardEnter, 0, 0, 0);
  EXPECT_FALSE(tracer.complete());
  tracer.record(kForwardEnter, 0, 0, 0);
  const Trace trace = tracer.finish(0);
  EXPECT_EQ(trace.events().size(), Tracer::kMaxEvents);
  EXPECT_TRUE(tracer.complete());
}

}  // namespace
}  // namespace castor
