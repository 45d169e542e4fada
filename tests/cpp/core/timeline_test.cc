#include "core/timeline.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "core/fakes.h"
#include "core/machine.h"
#include "core/steps.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

constexpr std::size_t kChunk = Net::kChunk;

struct Bench : SimulatedMachine {
  using SimulatedMachine::SimulatedMachine;

  /// A whole step, and what is known of it.
  Timeline train(const Step& step) {
    run(step);
    runtime->begin_update();
    runtime->finish_step();
    return runtime->timeline();
  }
};

std::size_t count(const Timeline& timeline, TransferKind kind, TransferCause cause) {
  std::size_t found = 0;
  for (const Transfer& transfer : timeline.transfers) {
    found += transfer.kind == kind && transfer.cause == cause ? 1 : 0;
  }
  return found;
}

/// What must hold of any finished step.
void expect_consistent(const Timeline& timeline, const Bench& bench) {
  const auto& events = timeline.trace.events();
  ASSERT_EQ(timeline.bytes.size(), events.size());
  EXPECT_TRUE(timeline.complete);
  std::map<ChunkId, bool> resident;
  std::size_t slot_bytes = 0;
  for (const ChunkId chunk : timeline.resident_at_start) {
    resident[chunk] = true;
    slot_bytes += bench.rig.layout.chunk(chunk).capacity_bytes;
  }
  std::size_t next = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(timeline.bytes[i].slot_bytes, slot_bytes) << "event " << i;
    EXPECT_LE(timeline.bytes[i].device_peak_bytes, bench.rig.device->ledger().budget());
    EXPECT_GE(timeline.bytes[i].device_peak_bytes, events[i].nonmodel_bytes);
    EXPECT_LE(timeline.bytes[i].device_peak_bytes, timeline.peak_device_bytes);
    for (; next < timeline.transfers.size() && timeline.transfers[next].event == i; ++next) {
      const Transfer& transfer = timeline.transfers[next];
      EXPECT_GE(transfer.start_ns, events[i].time_ns);
      EXPECT_LE(transfer.start_ns + transfer.submit_ns, timeline.end_ns);
      if (transfer.kind == TransferKind::kGradient) {
        continue;
      }
      const bool fetch = transfer.kind == TransferKind::kFetch;
      EXPECT_NE(resident[transfer.chunk], fetch) << "event " << i;
      resident[transfer.chunk] = fetch;
      const std::size_t bytes = bench.rig.layout.chunk(transfer.chunk).capacity_bytes;
      slot_bytes = fetch ? slot_bytes + bytes : slot_bytes - bytes;
    }
  }
  EXPECT_EQ(next, timeline.transfers.size()) << "transfers come in the order of events";
  EXPECT_EQ(slot_bytes, 0u) << "a step ends on the host";
  EXPECT_LE(timeline.update_begin_ns, timeline.end_ns);
}

TEST(TimelineTest, IsEmptyBeforeTheFirstStep) {
  const Bench bench(Net::row(1).layout(), kChunk);
  EXPECT_TRUE(bench.runtime->timeline().bytes.empty());
  EXPECT_EQ(bench.runtime->step_peak_device_bytes(), 0u);
}

TEST(TimelineTest, EachEventHasTheBytesAtItsBeginningAndThePeakUntilTheNext) {
  Bench bench(Net::row(2).layout(), 4 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  const std::size_t host_bytes = bench.rig.host->ledger().used();
  const Timeline step =
      bench.train({enter(0), allocate(100), release(60), exit(0), enter(1), exit(1), backward(1),
                   grad(1), backward(0), grad(0), release(40)});
  expect_consistent(step, bench);
  const auto& events = step.trace.events();
  ASSERT_EQ(events.size(), 8u);
  const std::vector<std::uint64_t> slots{0,          kChunk,     kChunk,     2 * kChunk,
                                         2 * kChunk, 2 * kChunk, 2 * kChunk, 2 * kChunk};
  const std::vector<std::uint64_t> nonmodel{100, 40, 40, 40, 40, 40, 40, 40};
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(step.bytes[i].slot_bytes, slots[i]) << i;
    EXPECT_EQ(events[i].nonmodel_bytes, nonmodel[i]) << i;
    EXPECT_EQ(step.bytes[i].host_bytes, host_bytes) << i;
  }
  EXPECT_EQ(step.bytes[0].device_peak_bytes, kChunk + 100);
  EXPECT_EQ(step.bytes[1].device_peak_bytes, kChunk + 40);
  EXPECT_EQ(step.bytes[2].device_peak_bytes, 2 * kChunk + 40);
  EXPECT_EQ(step.peak_device_bytes, 2 * kChunk + 40);
  EXPECT_EQ(bench.runtime->step_peak_device_bytes(), step.peak_device_bytes);
}

TEST(TimelineTest, ThePeakIsOfTheStepNotOfTheRun) {
  Bench bench(Net::row(1).layout(), 8 * kChunk);
  EXPECT_EQ(bench.train({enter(0), allocate(700), exit(0), backward(0), release(700), grad(0)})
                .peak_device_bytes,
            kChunk + 700);
  EXPECT_EQ(bench.train({enter(0), allocate(10), exit(0), backward(0), release(10), grad(0)})
                .peak_device_bytes,
            kChunk + 10);
}

TEST(TimelineTest, TimesAndStallsAreThoseOfTheClock) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  const Timeline step = bench.train(row_step(1));
  const auto& events = step.trace.events();
  EXPECT_EQ(events[0].time_ns, 0u);
  ASSERT_EQ(step.transfers.size(), 2u);
  // One look at the clock before a transfer and one after it, and the same for a wait.
  const Transfer& fetch = step.transfers[0];
  EXPECT_EQ(fetch.kind, TransferKind::kFetch);
  EXPECT_EQ(fetch.cause, TransferCause::kDemand);
  EXPECT_EQ(fetch.event, 0u);
  EXPECT_EQ(fetch.start_ns, 1u);
  EXPECT_EQ(fetch.submit_ns, 1u);
  EXPECT_EQ(fetch.wait_ns, 1u);
  EXPECT_EQ(fetch.bytes, kChunk);
  const Transfer& eviction = step.transfers[1];
  EXPECT_EQ(eviction.kind, TransferKind::kEviction);
  EXPECT_EQ(eviction.cause, TransferCause::kStepEnd);
  EXPECT_EQ(eviction.bytes, 0u) << "nothing was written: nothing is copied";
  EXPECT_GT(eviction.start_ns, step.update_begin_ns);
  EXPECT_LT(eviction.start_ns, step.end_ns);
}

TEST(TimelineTest, WritesOnTheDeviceAreCopiedToTheHost) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run({enter(0)});
  bench.rig.binder.write(param_id(0), 9);
  bench.run({exit(0), backward(0), grad(0)});
  const Timeline step = bench.train({});
  EXPECT_EQ(step.transfers.back().kind, TransferKind::kEviction);
  EXPECT_EQ(step.transfers.back().bytes, kChunk);
}

TEST(TimelineTest, GradientCopiesCarryTheCallersTimes) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  bench.run({enter(0), exit(0), backward(0)});
  const std::uint64_t start = bench.now_ns;
  bench.now_ns += 500;
  bench.runtime->grad_ready(param_id(0),
                            {.bytes = kChunk, .start_ns = start, .end_ns = bench.now_ns});
  const Timeline step = bench.train({});
  expect_consistent(step, bench);
  ASSERT_EQ(count(step, TransferKind::kGradient, TransferCause::kBackward), 1u);
  const Transfer& gradient = step.transfers[1];
  EXPECT_EQ(gradient.start_ns, start - 1000);
  EXPECT_EQ(gradient.submit_ns, 500u);
  EXPECT_EQ(gradient.bytes, kChunk);
}

TEST(TimelineTest, CausesTellWhoMadeRoom) {
  // Two slots for four chunks. Unplanned first: fetches on demand, each making its own room.
  Bench bench(Net::row(4).layout(), 2 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  const Timeline first = bench.train(row_step(4));
  expect_consistent(first, bench);
  EXPECT_EQ(first.guidance, Guidance::kDemand);
  EXPECT_EQ(count(first, TransferKind::kFetch, TransferCause::kDemand), 6u);
  EXPECT_EQ(count(first, TransferKind::kEviction, TransferCause::kDemand), 4u);
  EXPECT_EQ(count(first, TransferKind::kEviction, TransferCause::kStepEnd), 2u);
  const Timeline second = bench.train(row_step(4));
  expect_consistent(second, bench);
  EXPECT_EQ(second.guidance, Guidance::kPlan);
  EXPECT_GT(count(second, TransferKind::kFetch, TransferCause::kPrefetch), 0u);
  EXPECT_EQ(count(second, TransferKind::kFetch, TransferCause::kDemand) +
                count(second, TransferKind::kFetch, TransferCause::kPrefetch),
            6u);
}

TEST(TimelineTest, AnAllocationThatDoesNotFitEvictsUnderPressure) {
  Bench bench(Net::row(2).layout(), 2 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  const Timeline step = bench.train({enter(0), exit(0), enter(1), allocate(kChunk), exit(1),
                                     backward(1), grad(1), release(kChunk), backward(0), grad(0)});
  expect_consistent(step, bench);
  EXPECT_EQ(count(step, TransferKind::kEviction, TransferCause::kPressure), 1u);
  EXPECT_EQ(step.peak_device_bytes, 2 * kChunk);
}

TEST(TimelineTest, AStepThatLeavesThePlanSaysSo) {
  Bench bench(Net::row(2).layout(), 4 * kChunk);
  bench.train(row_step(2));
  EXPECT_EQ(bench.train(row_step(2)).guidance, Guidance::kPlan);
  const Step other{enter(1), exit(1), backward(1), grad(1)};
  EXPECT_EQ(bench.train(other).guidance, Guidance::kDiverged);
}

TEST(TimelineTest, InferenceIsNotAStepButLeavesItsChunks) {
  Bench bench(Net::row(2).layout(), 4 * kChunk);
  bench.runtime->enter(module_id(0), PassMode::kInference);
  bench.runtime->exit(module_id(0));
  EXPECT_TRUE(bench.runtime->timeline().bytes.empty());
  const Timeline step = bench.train(row_step(2));
  expect_consistent(step, bench);
  EXPECT_EQ(step.resident_at_start, std::vector<ChunkId>{chunk_id(0)});
  EXPECT_EQ(step.bytes[0].slot_bytes, kChunk);
}

TEST(TimelineTest, AStepWithoutModulesKeepsTheLastOne) {
  Bench bench(Net::row(1).layout(), 2 * kChunk);
  const std::size_t events = bench.train(row_step(1)).bytes.size();
  EXPECT_EQ(bench.train({}).bytes.size(), events);
}

TEST(TimelineTest, ChunksThatLiveOnTheDeviceNeverMove) {
  Bench bench(Net::row(2).layout(), 4 * kChunk, {}, {Placement::kDevice, Placement::kStream});
  const Timeline step = bench.train(row_step(2));
  expect_consistent(step, bench);
  for (const Transfer& transfer : step.transfers) {
    EXPECT_EQ(transfer.chunk, chunk_id(1));
  }
  EXPECT_TRUE(step.resident_at_start.empty());
  EXPECT_EQ(step.peak_device_bytes, 2 * kChunk);
}

TEST(TimelineTest, TransfersAddUpToTheCountersInRandomSteps) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const Net net = random_net(random);
    const Step step = random_step(net, random);
    ChunkLayout layout = net.layout();
    const std::size_t bytes = layout.largest_working_set_bytes() + 6000;
    Bench bench(std::move(layout), bytes);
    for (int repetition = 0; repetition < 3; ++repetition) {
      const RuntimeCounts before = bench.runtime->counts();
      const TransferCounts moved_before = bench.runtime->transfers();
      const Timeline timeline = bench.train(step);
      expect_consistent(timeline, bench);
      const RuntimeCounts after = bench.runtime->counts();
      const TransferCounts moved = bench.runtime->transfers();
      EXPECT_EQ(count(timeline, TransferKind::kFetch, TransferCause::kDemand),
                after.demand_fetches - before.demand_fetches);
      EXPECT_EQ(count(timeline, TransferKind::kEviction, TransferCause::kPressure),
                after.pressure_evictions - before.pressure_evictions);
      std::uint64_t h2d_bytes = 0;
      std::size_t evictions = 0;
      for (const Transfer& transfer : timeline.transfers) {
        h2d_bytes += transfer.kind == TransferKind::kFetch ? transfer.bytes : 0;
        evictions +=
            transfer.kind == TransferKind::kEviction && transfer.cause != TransferCause::kStepEnd
                ? 1
                : 0;
      }
      EXPECT_EQ(h2d_bytes, moved.h2d_bytes - moved_before.h2d_bytes);
      EXPECT_EQ(evictions, moved.evictions - moved_before.evictions);
    }
  }
}

}  // namespace
}  // namespace castor
