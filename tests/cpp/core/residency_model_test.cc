// Random steps through the runtime, the planner and the simulator: which chunks are in slots and
// pinned, and when each is used next, is the same in all three at each moment.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/dry_run.h"
#include "core/fakes.h"
#include "core/machine.h"
#include "core/planner.h"
#include "core/residency.h"
#include "core/simulated_steps.h"
#include "core/simulator.h"
#include "core/steps.h"

namespace castor {
namespace {

using testing::Act;
using testing::chunk_id;
using testing::SimulatedMachine;

void expect_same(const Residency& left, const Residency& right, std::size_t num_chunks) {
  EXPECT_EQ(left.slot_bytes(), right.slot_bytes());
  EXPECT_EQ(left.pinned_bytes(), right.pinned_bytes());
  EXPECT_EQ(left.held_bytes(), right.held_bytes());
  for (std::size_t i = 0; i < num_chunks; ++i) {
    SCOPED_TRACE("chunk " + std::to_string(i));
    const ChunkId chunk = chunk_id(i);
    EXPECT_EQ(left.placement(chunk), right.placement(chunk));
    EXPECT_EQ(left.in_slot(chunk), right.in_slot(chunk));
    EXPECT_EQ(left.pins(chunk), right.pins(chunk));
    EXPECT_EQ(left.next_use(chunk), right.next_use(chunk));
  }
}

/// The account adds up to its chunks.
void expect_consistent(const Residency& residency, std::size_t num_chunks) {
  std::size_t slots = 0;
  std::size_t pinned = 0;
  for (std::size_t i = 0; i < num_chunks; ++i) {
    const ChunkId chunk = chunk_id(i);
    slots += residency.in_slot(chunk) ? residency.capacity(chunk) : 0;
    pinned += residency.in_slot(chunk) && residency.pins(chunk) > 0 ? residency.capacity(chunk) : 0;
    EXPECT_TRUE(residency.resident(chunk) || residency.pins(chunk) == 0);
    EXPECT_FALSE(residency.on_device(chunk) && residency.in_slot(chunk));
  }
  EXPECT_EQ(residency.slot_bytes(), slots);
  EXPECT_EQ(residency.pinned_bytes(), pinned);
  EXPECT_LE(pinned, residency.held_bytes());
  EXPECT_LE(residency.held_bytes(), slots);
}

bool is_moment(const Act& act) {
  return act.kind == Act::Kind::kEnter || act.kind == Act::Kind::kExit ||
         act.kind == Act::Kind::kBackward;
}

TEST(ResidencyModelTest, RuntimePlannerAndSimulatorAgreeAtEachMoment) {
  std::uint64_t evictions = 0;
  std::uint64_t prefetches = 0;
  for (unsigned seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const testing::Net net = testing::random_net(random);
    const testing::Step step = testing::random_step(net, random);
    const ChunkLayout layout = net.layout();
    const std::size_t num_chunks = layout.chunks().size();
    std::vector<Placement> placements(num_chunks, Placement::kStream);
    for (Placement& placement : placements) {
      if (random() % 4 == 0) {
        placement = static_cast<Placement>(random() % 3);
      }
    }
    const RuntimeOptions options{
        .policy = random() % 3 == 0 ? PlacementPolicy::kCpu : PlacementPolicy::kAuto,
        .max_prefetch = random() % 4};
    SimulatedMachine recorder(layout, std::size_t{1} << 20, options, placements);
    recorder.run(step);
    recorder.runtime->finish_step();
    const Trace trace = *recorder.runtime->trace();
    const std::size_t budget =
        recorder.runtime->prediction()->smallest_budget_bytes + random() % 512;

    SimulatedMachine machine(layout, budget, options, placements);
    const Plan plan = make_plan(trace, layout, placements,
                                {.device_budget_bytes = budget,
                                 .fixed_device_bytes = machine.rig.device->ledger().used(),
                                 .max_prefetch = options.max_prefetch,
                                 .policy = options.policy});
    machine.runtime->load_trace(trace);
    DryRun dry_run(layout, placements, plan);
    std::size_t next = 0;
    for (const Act& act : step) {
      machine.act(act);
      if (is_moment(act)) {
        for (; trace.events()[next].kind == EventKind::kGradReady; ++next) {
          dry_run.step(trace.events()[next]);
        }
        SCOPED_TRACE("moment " + std::to_string(next));
        dry_run.step(trace.events()[next++]);
        expect_same(machine.rig.manager->residency(), dry_run.residency(), num_chunks);
        expect_consistent(dry_run.residency(), num_chunks);
        ASSERT_FALSE(HasFailure());
      }
    }
    const SimulatedStep simulated =
        simulate_step(trace, std::vector<double>(trace.events().size(), 1.0), layout, placements,
                      plan, testing::unit_hardware(), testing::fp32_adam());
    for (const auto& [found, expected] :
         {std::pair(dry_run.demand_fetches(), simulated.demand_fetches),
          std::pair(dry_run.evictions(), simulated.evictions),
          std::pair(dry_run.h2d_bytes(), simulated.h2d_bytes)}) {
      EXPECT_EQ(found, expected);
    }
    const Prediction& prediction = plan.prediction();
    EXPECT_EQ(dry_run.demand_fetches(), prediction.demand_fetches);
    EXPECT_EQ(dry_run.evictions(), prediction.evictions);
    EXPECT_EQ(dry_run.h2d_bytes(), prediction.h2d_bytes);
    const TransferCounts transfers = machine.runtime->transfers();
    EXPECT_EQ(transfers.evictions, prediction.evictions);
    EXPECT_EQ(transfers.h2d_bytes, prediction.h2d_bytes);
    evictions += prediction.evictions;
    prefetches += prediction.prefetches;
  }
  EXPECT_GT(evictions, 1000u) << "budgets were too generous to test anything";
  EXPECT_GT(prefetches, 1000u);
}

}  // namespace
}  // namespace castor
