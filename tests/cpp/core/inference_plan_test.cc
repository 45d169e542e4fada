#include "core/inference_plan.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/machine.h"
#include "core/runtime.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

constexpr std::size_t kChunk = Net::kChunk;

/// A model, module 0, around `count` modules of one chunk each: module i has chunk i - 1.
Net model_of(std::size_t count) {
  Net net;
  net.add({});
  for (std::size_t i = 0; i < count; ++i) {
    net.add({Net::kWhole});
  }
  return net;
}

/// A forward through `modules`, within the model.
Step pass_through(const std::vector<std::size_t>& modules, std::size_t temporary = 0) {
  Step step = {enter(0)};
  for (const std::size_t module : modules) {
    for (const Act& act : {enter(module), allocate(temporary), release(temporary), exit(module)}) {
      step.push_back(act);
    }
  }
  step.push_back(exit(0));
  return step;
}

std::vector<std::size_t> up_to(std::size_t count) {
  std::vector<std::size_t> modules;
  for (std::size_t i = 1; i <= count; ++i) {
    modules.push_back(i);
  }
  return modules;
}

struct Machine : SimulatedMachine {
  using SimulatedMachine::SimulatedMachine;

  struct Pass {
    std::uint64_t demand_fetches = 0;
    std::uint64_t fetched_bytes = 0;
  };
  /// What a pass added to the counters.
  Pass infer(const Step& step) {
    const RuntimeCounts counts = runtime->counts();
    const TransferCounts transfers = runtime->transfers();
    run(step, PassMode::kInference);
    rig.expect_consistent();
    return {.demand_fetches = runtime->counts().demand_fetches - counts.demand_fetches,
            .fetched_bytes = runtime->transfers().h2d_bytes - transfers.h2d_bytes};
  }
  void train(const Step& step) {
    run(step);
    runtime->finish_step();
  }
};

struct Planned {
  ChunkLayout layout;
  std::vector<Placement> placements;
  Residency residency;
  InferencePlan plan;

  explicit Planned(const Net& net)
      : layout(net.layout()),
        placements(layout.chunks().size(), Placement::kStream),
        residency(layout, placements),
        plan(layout) {}

  /// A round over all modules.
  void learn() {
    for (int i = 0; i < 2; ++i) {
      static_cast<void>(plan.begin_pass(module_id(0)));
      for (std::size_t module = 0; module < layout.modules().size() && i == 0; ++module) {
        plan.enter(module_id(module));
      }
    }
  }
  [[nodiscard]] std::vector<bool> staying(const InferenceRoom& room) {
    static_cast<void>(plan.make_room_for(residency, room));
    std::vector<bool> stays;
    for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
      stays.push_back(plan.stays(chunk_id(i)));
    }
    return stays;
  }
};

TEST(InferencePlanTest, ChunksThatStayAreSpreadOverTheRound) {
  Planned planned(model_of(8));
  planned.learn();
  EXPECT_EQ(planned.staying({.cap_bytes = 6 * kChunk}),
            (std::vector<bool>{true, false, true, false, true, false, true, false}))
      << "two more are for the one in use and the next";
  EXPECT_EQ(planned.staying({.cap_bytes = 4 * kChunk}),
            (std::vector<bool>{true, false, false, false, true, false, false, false}))
      << "those that stay with less stay with more";
  EXPECT_EQ(planned.staying({.cap_bytes = 8 * kChunk}), std::vector<bool>(8, true));
}

TEST(InferencePlanTest, WithoutPrefetchNothingIsKeptForIt) {
  Planned planned(model_of(4));
  planned.learn();
  EXPECT_EQ(planned.staying({.cap_bytes = 3 * kChunk, .max_prefetch = 0}),
            (std::vector<bool>{true, false, true, false}));
}

TEST(InferencePlanTest, ALargeChunkStaysBecauseItsRoomToStreamWouldBeLarge) {
  Net net = model_of(6);
  net.add({3 * Net::kWhole});
  Planned planned(net);
  planned.learn();
  EXPECT_EQ(planned.staying({.cap_bytes = 5 * kChunk}),
            (std::vector<bool>{false, false, false, false, false, false, true}));
}

TEST(InferencePlanTest, PolicyCpuKeepsNothingBetweenUses) {
  Machine machine(model_of(8).layout(), 8 * kChunk, {.policy = PlacementPolicy::kCpu});
  machine.infer(pass_through(up_to(8)));
  EXPECT_EQ(machine.infer(pass_through(up_to(8))).demand_fetches, 0U);
  EXPECT_EQ(machine.rig.manager->slot_bytes(), 2 * kChunk);
}

TEST(InferencePlanTest, LaterPassesFetchNothingOnDemandAndOnlyWhatDoesNotStay) {
  for (const std::size_t ahead : {1U, 2U, 3U}) {
    Machine machine(model_of(12).layout(), 6 * kChunk, {.max_prefetch = ahead});
    EXPECT_EQ(machine.infer(pass_through(up_to(12))).demand_fetches, 12U);
    EXPECT_EQ(machine.infer(pass_through(up_to(12))).demand_fetches, 0U) << ahead;
    for (int i = 0; i < 5; ++i) {
      const Machine::Pass pass = machine.infer(pass_through(up_to(12)));
      EXPECT_EQ(pass.demand_fetches, 0U) << ahead;
      EXPECT_EQ(pass.fetched_bytes, (12 - (6 - 1 - ahead)) * kChunk) << ahead;
    }
  }
}

TEST(InferencePlanTest, TheEndOfAPassFetchesForTheBeginningOfTheNext) {
  Machine machine(model_of(6).layout(), 3 * kChunk);
  const Step pass = pass_through({2, 3, 4, 5, 6, 1});  // chunk 1 stays, the others stream
  machine.infer(pass);
  machine.infer(pass);
  machine.infer(pass);
  EXPECT_TRUE(machine.rig.manager->resident(chunk_id(1)));
  EXPECT_TRUE(machine.rig.manager->resident(chunk_id(2))) << "fetched ahead of the next pass";
}

TEST(InferencePlanTest, AllThatFitsIsFetchedOnce) {
  Machine machine(model_of(5).layout(), 5 * kChunk);
  EXPECT_EQ(machine.infer(pass_through(up_to(5))).fetched_bytes, 5 * kChunk);
  EXPECT_EQ(machine.infer(pass_through(up_to(5))).fetched_bytes, 0U);
}

TEST(InferencePlanTest, ChunksThatStayGiveWayAsACacheGrows) {
  Machine machine(model_of(12).layout(), 8 * kChunk);
  machine.infer(pass_through(up_to(12)));
  constexpr std::size_t kGrowth = 60;
  std::size_t cached = 0;
  for (; cached < 6 * kChunk - kGrowth; cached += kGrowth) {
    Step pass = pass_through(up_to(12));
    pass.insert(pass.begin() + 2, allocate(kGrowth));  // within the model and its first module
    EXPECT_EQ(machine.infer(pass).demand_fetches, 0U) << cached;
  }
  EXPECT_EQ(machine.rig.manager->counts().demotions, 0U);
  machine.nonmodel->free(cached);
  machine.infer(pass_through(up_to(12)));
  machine.infer(pass_through(up_to(12)));  // by the peak of the one before
  EXPECT_EQ(machine.infer(pass_through(up_to(12))).fetched_bytes, 6 * kChunk) << "room is used";
}

TEST(InferencePlanTest, TemporariesOfThePassBeforeHaveRoomInTheNext) {
  Machine machine(model_of(12).layout(), 8 * kChunk);
  const Step pass = pass_through(up_to(12), 3 * kChunk);
  machine.infer(pass);
  machine.infer(pass);
  const std::uint64_t pressed = machine.runtime->counts().pressure_evictions;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(machine.infer(pass).demand_fetches, 0U);
  }
  EXPECT_EQ(machine.runtime->counts().pressure_evictions, pressed);
}

TEST(InferencePlanTest, OtherModulesAreServedOnDemandAndAreTheNextPlan) {
  Machine machine(model_of(12).layout(), 6 * kChunk);
  machine.infer(pass_through(up_to(12)));
  machine.infer(pass_through(up_to(12)));
  const std::vector<std::size_t> others = {1, 2, 3, 12, 11, 10, 9, 8, 7};
  EXPECT_GT(machine.infer(pass_through(others)).demand_fetches, 0U);
  EXPECT_EQ(machine.infer(pass_through(others)).demand_fetches, 0U);
  EXPECT_EQ(machine.infer(pass_through(others)).demand_fetches, 0U);
  machine.infer(pass_through({1, 2}));  // ends early
  for (int i = 0; i < 2; ++i) {
    machine.infer(pass_through(up_to(12)));
  }
  EXPECT_EQ(machine.infer(pass_through(up_to(12))).demand_fetches, 0U);
}

TEST(InferencePlanTest, PartsThatAreCalledInTurnAreOneRound) {
  Machine machine(Net::row(12).layout(), 6 * kChunk);
  Step parts;
  for (std::size_t i = 0; i < 12; ++i) {  // each is outermost
    parts.push_back(enter(i));
    parts.push_back(exit(i));
  }
  EXPECT_EQ(machine.infer(parts).demand_fetches, 12U);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(machine.infer(parts).demand_fetches, 0U);
  }
}

TEST(InferencePlanTest, ParametersWrittenBetweenPassesAreRead) {
  Machine machine(model_of(8).layout(), 4 * kChunk);
  for (std::uint8_t i = 1; i < 6; ++i) {
    for (std::size_t param = 0; param < 8; ++param) {
      machine.rig.write(param_id(param), static_cast<std::uint8_t>(i * 10 + param));
    }
    for (const Act& act : pass_through(up_to(8))) {
      machine.act(act, PassMode::kInference);
      if (act.kind == Act::Kind::kEnter && act.value > 0) {
        EXPECT_TRUE(machine.rig.reads(param_id(act.value - 1),
                                      static_cast<std::uint8_t>(i * 10 + act.value - 1)));
      }
    }
  }
}

TEST(InferencePlanTest, StepsRunByTheirPlanBehindInference) {
  const auto demand_fetches = [](bool infers) {
    Machine machine(Net::row(6).layout(), 3 * kChunk);
    for (int i = 0; i < 4; ++i) {
      machine.train(row_step(6, 16));
      for (int pass = 0; pass < 3 && infers; ++pass) {
        machine.infer(pass_through(up_to(5)));
      }
    }
    EXPECT_EQ(machine.runtime->counts().plans, 1U);
    EXPECT_EQ(machine.runtime->counts().divergent_steps, 0U);
    const std::uint64_t before = machine.runtime->counts().demand_fetches;
    machine.train(row_step(6, 16));
    EXPECT_EQ(machine.runtime->counts().plans, 1U);
    return machine.runtime->counts().demand_fetches - before;
  };
  EXPECT_LE(demand_fetches(true), demand_fetches(false));
}

TEST(InferencePlanTest, InferenceThatPressesDoesNotPlanStepsAgain) {
  Machine machine(model_of(6).layout(), 5 * kChunk);
  const Step step = {enter(0), enter(1),    exit(1),     enter(2), exit(2),
                     exit(0),  backward(2), backward(1), grad(0),  grad(1)};
  machine.train(step);
  for (int i = 0; i < 3; ++i) {
    machine.infer(pass_through(up_to(6), 4 * kChunk));
    machine.train(step);
  }
  EXPECT_GT(machine.runtime->counts().pressure_evictions, 0U);
  EXPECT_EQ(machine.runtime->counts().plans, 1U);
}

TEST(InferencePlanTest, InferenceWithinAStepLeavesItsTraceAsItIs) {
  const auto trace_of_step = [](bool infers) {
    Machine machine(model_of(4).layout(), 4 * kChunk);
    const Step forward = {enter(0), enter(1), allocate(100), exit(1), exit(0)};
    const Step backward_pass = {backward(1), release(100), grad(0)};
    machine.run(forward);
    if (infers) {
      machine.infer(pass_through({1, 2, 3}));
    }
    machine.train(backward_pass);
    std::vector<std::uint64_t> nonmodel;
    const std::optional<Trace> trace = machine.runtime->trace();
    for (const Event& event : trace.value().events()) {
      nonmodel.push_back(event.nonmodel_bytes);
    }
    return nonmodel;
  };
  EXPECT_EQ(trace_of_step(true), trace_of_step(false));
}

TEST(InferencePlanTest, WhatInferenceTakesWithinAStepIsInItsTrace) {
  Machine machine(model_of(4).layout(), 6 * kChunk);
  machine.run({enter(0), enter(1), exit(1), exit(0)});
  machine.infer(pass_through({1, 2, 3}, 300));
  machine.train({backward(1), grad(0)});
  EXPECT_EQ(machine.runtime->trace()->events()[3].nonmodel_bytes, 300U);
}

TEST(InferencePlanTest, ParamsThatAreNotInMemoryAreAnnounced) {
  Machine machine(model_of(8).layout(), 3 * kChunk, {}, {}, std::vector<bool>(8, true));
  machine.infer(pass_through(up_to(8)));
  EXPECT_EQ(machine.rig.store.num_announced(), 0U);
  EXPECT_EQ(machine.infer(pass_through(up_to(8))).demand_fetches, 0U);
  EXPECT_GT(machine.rig.store.num_announced(), 0U);
}

}  // namespace
}  // namespace castor
