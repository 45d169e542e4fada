#include "core/runtime.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/machine.h"
#include "core/nonmodel_memory.h"
#include "core/steps.h"

namespace castor {
namespace {

using namespace castor::testing;  // NOLINT(google-build-using-namespace): the words of a step

constexpr std::size_t kChunk = Net::kChunk;

struct Machine : SimulatedMachine {
  using SimulatedMachine::SimulatedMachine;

  /// A whole step; what it added to the counters.
  RuntimeCounts train(const Step& step) {
    const RuntimeCounts before = runtime->counts();
    run(step);
    runtime->finish_step();
    rig.expect_consistent();
    EXPECT_EQ(rig.manager->slot_bytes(), 0u);
    RuntimeCounts after = runtime->counts();
    after.demand_fetches -= before.demand_fetches;
    after.prefetch_hits -= before.prefetch_hits;
    after.pressure_evictions -= before.pressure_evictions;
    return after;
  }
  [[nodiscard]] bool resident(std::size_t chunk) const {
    return rig.manager->resident(chunk_id(chunk));
  }
  [[nodiscard]] std::uint32_t pins(std::size_t chunk) const {
    return rig.manager->pins(chunk_id(chunk));
  }
  [[nodiscard]] TensorState state(std::size_t param) const {
    return rig.manager->state(param_id(param));
  }
};

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const OutOfMemory& error) {
    return error.what();
  }
  return "no throw";
}

TEST(RuntimeTest, RejectsOptionsOutOfRange) {
  const auto start = [](const RuntimeOptions& options) {
    const Machine machine(Net::row(1).layout(), kChunk, options);
  };
  EXPECT_THROW(start({.warmup_nonmodel_ratio = 1.0}), InvalidArgument);
  EXPECT_THROW(start({.warmup_nonmodel_ratio = -0.1}), InvalidArgument);
  EXPECT_THROW(start({.steady_cap_ratio = 0.0}), InvalidArgument);
  EXPECT_THROW(start({.steady_cap_ratio = 1.1}), InvalidArgument);
  EXPECT_THROW(start({.margin_ratio = -0.1}), InvalidArgument);
  EXPECT_THROW(start({.margin_ratio = 1.1}), InvalidArgument);
  EXPECT_NO_THROW(start({.warmup_nonmodel_ratio = 0.0, .steady_cap_ratio = 1.0}));
}

TEST(RuntimeTest, NamesTheModuleThatAloneExceedsTheDevice) {
  Net net;
  net.add({Net::kWhole});
  net.add({Net::kWhole, Net::kWhole});
  EXPECT_EQ(message_of([&] { const Machine machine(net.layout(), 2 * kChunk - 1); }),
            "out of device memory: requested 512 bytes, available 511 bytes of a budget of 511 "
            "bytes. the chunks of module 'm1' alone need that much at once; give device_memory at "
            "least 512 bytes plus room for activations, or a smaller chunk_bytes");
  EXPECT_EQ(message_of([&] { const Machine machine(net.layout(), 2 * kChunk); }), "no throw");
}

TEST(RuntimeTest, ChunksThatLiveOnTheDeviceNeedNoSlot) {
  const Net net = Net::row(2);
  Machine machine(net.layout(), 2 * kChunk, {}, {Placement::kDevice, Placement::kDevice});
  const RuntimeCounts counts = machine.train(row_step(2));
  EXPECT_EQ(counts.demand_fetches, 0u);
  EXPECT_THROW(Machine(net.layout(), 2 * kChunk - 1, {}, {Placement::kDevice}), OutOfMemory);
}

TEST(RuntimeTest, EnteredModuleIsPinnedBoundAndInUse) {
  Machine machine(Net::row(2).layout(), 2 * kChunk);
  machine.act(enter(1));
  EXPECT_EQ(machine.pins(1), 1u);
  EXPECT_EQ(machine.state(1), TensorState::kCompute);
  EXPECT_TRUE(machine.rig.binder.reads(param_id(1), Rig::initial(1)));
  EXPECT_FALSE(machine.rig.bound_to_host(chunk_id(1)));
  EXPECT_FALSE(machine.runtime->idle());
  machine.act(exit(1));
  EXPECT_EQ(machine.pins(1), 0u);
  EXPECT_EQ(machine.state(1), TensorState::kHold);
  EXPECT_TRUE(machine.resident(1)) << "it stays until the room is needed";
  EXPECT_TRUE(machine.runtime->idle());
}

TEST(RuntimeTest, WarmUpKeepsToItsShareAndDropsTheLeastRecentlyUsed) {
  Machine machine(Net::row(4).layout(), 4 * kChunk, {.warmup_nonmodel_ratio = 0.5});
  machine.run({enter(0), exit(0), enter(1), exit(1), enter(2), exit(2)});
  EXPECT_EQ(machine.rig.manager->slot_bytes(), 2 * kChunk);
  EXPECT_FALSE(machine.resident(0));
  EXPECT_TRUE(machine.resident(1));
}

TEST(RuntimeTest, InferenceUsesAllRoomAndDropsTheMostRecentlyUsed) {
  Machine machine(Net::row(4).layout(), 3 * kChunk, {.warmup_nonmodel_ratio = 0.9});
  machine.run({enter(0), exit(0), enter(1), exit(1), enter(2), exit(2), enter(3), exit(3)},
              PassMode::kInference);
  EXPECT_TRUE(machine.resident(0));
  EXPECT_TRUE(machine.resident(1));
  EXPECT_FALSE(machine.resident(2));
}

TEST(RuntimeTest, WarmUpStepBecomesThePlan) {
  Machine machine(Net::row(3).layout(), 3 * kChunk, {.max_prefetch = 1});
  EXPECT_FALSE(machine.runtime->prediction().has_value());
  EXPECT_FALSE(machine.runtime->trace().has_value());
  const RuntimeCounts warm_up = machine.train(row_step(3));
  EXPECT_EQ(warm_up.steps, 1u);
  EXPECT_EQ(warm_up.plans, 1u);
  EXPECT_EQ(warm_up.demand_fetches, 5u) << "one slot: all but the turn";
  ASSERT_TRUE(machine.runtime->prediction().has_value());
  EXPECT_EQ(machine.runtime->trace()->signature(), trace_of(row_step(3)).signature());
  const RuntimeCounts planned = machine.train(row_step(3));
  EXPECT_EQ(planned.plans, 1u);
  EXPECT_EQ(planned.demand_fetches, 1u);
  EXPECT_EQ(planned.prefetch_hits, 2u);
  EXPECT_EQ(planned.divergent_steps, 0u);
}

TEST(RuntimeTest, FreeSlotsGoBeforeTheActivationsThatThePlanExpects) {
  Machine machine(Net::row(3).layout(), 4 * kChunk, {.kept_slot_bytes = 0});
  const Step step = {enter(0),   exit(0),  enter(1), allocate(2 * kChunk), release(2 * kChunk),
                     exit(1),    enter(2), exit(2),  backward(2),          backward(1),
                     backward(0)};
  machine.train(step);
  machine.run({enter(0)});
  EXPECT_GE(machine.rig.device_blocks->kept() + machine.rig.manager->slot_bytes(), 3 * kChunk);
  machine.run({exit(0), enter(1)});
  EXPECT_LE(machine.rig.device_blocks->kept() + machine.rig.manager->slot_bytes(), 2 * kChunk);
}

TEST(RuntimeTest, FreeSlotsGoBeforeActivationsThatNoPlanKnowsOf) {
  Machine machine(Net::row(3).layout(), 4 * kChunk, {.kept_slot_bytes = 0});
  const auto resident_slots = [&] {
    return machine.rig.device_blocks->kept() + machine.rig.manager->slot_bytes();
  };
  machine.run({enter(0), exit(0)}, PassMode::kInference);
  EXPECT_GE(resident_slots(), 4 * kChunk);
  machine.run({allocate(2 * kChunk), enter(1), exit(1)}, PassMode::kInference);
  EXPECT_LE(resident_slots(), 2 * kChunk);
  machine.run({release(2 * kChunk)}, PassMode::kInference);
}

TEST(RuntimeTest, TraceHoldsTheActivationsAndTheClock) {
  Machine machine(Net::row(2).layout(), 10 * kChunk);
  machine.train({enter(0), allocate(100), exit(0), allocate(50), release(150), enter(1),
                 allocate(70), release(70), exit(1), backward(1), grad(1)});
  const auto trace = machine.runtime->trace();
  ASSERT_TRUE(trace.has_value());
  std::vector<std::uint64_t> bytes;
  std::vector<std::uint64_t> times;
  for (const Event& event : trace->events()) {
    bytes.push_back(event.nonmodel_bytes);
    times.push_back(event.time_ns);
  }
  EXPECT_EQ(bytes, (std::vector<std::uint64_t>{100, 150, 70, 0, 0, 0}));
  // One look at the clock a moment; four more for each fetch and its wait, and two for the eviction
  // before the second one (the warm-up keeps to a fifth of the device).
  EXPECT_EQ(times, (std::vector<std::uint64_t>{0, 5, 6, 13, 14, 15}));
  EXPECT_EQ(trace->events().back().kind, EventKind::kGradReady);
}

TEST(RuntimeTest, ReplayedStepMatchesItsPredictionExactly) {
  std::uint64_t evictions = 0;
  std::uint64_t prefetches = 0;
  int exact_peaks = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Net net = random_net(random);
    const Step step = random_step(net, random);
    const ChunkLayout layout = net.layout();
    std::vector<Placement> placements(layout.chunks().size());
    for (Placement& placement : placements) {
      placement = random() % 6 == 0   ? Placement::kDevice
                  : random() % 6 == 0 ? Placement::kKeep
                                      : Placement::kStream;
    }
    const RuntimeOptions options{
        .policy = random() % 3 == 0 ? PlacementPolicy::kCpu : PlacementPolicy::kAuto,
        .max_prefetch = random() % 4};
    Machine recorder(layout, std::size_t{1} << 20, options, placements);
    recorder.train(step);
    const std::size_t smallest = recorder.runtime->prediction()->smallest_budget_bytes;

    Machine machine(layout, smallest + random() % 512, options, placements);
    machine.runtime->load_trace(*recorder.runtime->trace());
    const Prediction prediction = *machine.runtime->prediction();
    EXPECT_EQ(prediction.smallest_budget_bytes, smallest);
    machine.run(step);
    machine.rig.expect_consistent();
    machine.runtime->finish_step();
    const RuntimeCounts counts = machine.runtime->counts();
    const TransferCounts transfers = machine.runtime->transfers();
    EXPECT_EQ(counts.demand_fetches, prediction.demand_fetches);
    EXPECT_EQ(transfers.fetches, prediction.demand_fetches + prediction.prefetches);
    EXPECT_EQ(transfers.evictions, prediction.evictions);
    EXPECT_EQ(transfers.h2d_bytes, prediction.h2d_bytes);
    EXPECT_EQ(transfers.d2h_bytes, 0u);
    EXPECT_LE(machine.rig.device->ledger().peak(), prediction.peak_device_bytes);
    exact_peaks += machine.rig.device->ledger().peak() == prediction.peak_device_bytes ? 1 : 0;
    EXPECT_EQ(counts.pressure_evictions, 0u);
    EXPECT_EQ(counts.divergent_steps, 0u);
    EXPECT_EQ(counts.plans, 1u) << "load_trace";
    EXPECT_EQ(machine.nonmodel->bytes(), 0u);
    evictions += prediction.evictions;
    prefetches += prediction.prefetches;
    if (HasFailure()) {
      return;
    }
  }
  EXPECT_GT(evictions, 1000u) << "budgets were too generous to test anything";
  EXPECT_GT(prefetches, 1000u);
  // A trace does not hold how low activations are when a module is entered: the peak is a bound.
  EXPECT_GT(exact_peaks, 380);
}

TEST(RuntimeTest, DivergentStepRunsIsCountedAndReplansWhenItRepeats) {
  Machine machine(Net::row(4).layout(), 2 * kChunk);
  const Step usual = row_step(4);
  const Step other = {enter(3), exit(3), enter(0), exit(0), backward(0), backward(3)};
  machine.train(usual);
  EXPECT_EQ(machine.train(other).divergent_steps, 1u);
  EXPECT_EQ(machine.train(usual).plans, 1u);
  EXPECT_EQ(machine.train(other).plans, 1u) << "not in a row";
  const RuntimeCounts repeated = machine.train(other);
  EXPECT_EQ(repeated.plans, 2u);
  EXPECT_EQ(repeated.divergent_steps, 3u);
  EXPECT_EQ(machine.train(other).divergent_steps, 3u) << "it is the plan now";
  EXPECT_EQ(machine.runtime->trace()->signature(), trace_of(other).signature());
}

TEST(RuntimeTest, StepThatEndsEarlyOrLateDiverges) {
  Machine machine(Net::row(3).layout(), 3 * kChunk);
  machine.train(row_step(3));
  EXPECT_EQ(machine.train({enter(0), exit(0)}).divergent_steps, 1u);
  Step longer = row_step(3);
  longer.insert(longer.end(), {enter(2), exit(2)});
  EXPECT_EQ(machine.train(longer).divergent_steps, 2u);
  EXPECT_EQ(machine.train(row_step(3)).divergent_steps, 2u);
}

TEST(RuntimeTest, StepWithoutAccessesTeachesNothing) {
  Machine machine(Net::row(2).layout(), 2 * kChunk);
  EXPECT_EQ(machine.train({}).plans, 0u);
  machine.train(row_step(2));
  const RuntimeCounts counts = machine.train({});
  EXPECT_EQ(counts.divergent_steps, 0u);
  EXPECT_EQ(counts.steps, 3u);
}

TEST(RuntimeTest, PressureEvictsThenThrowsWithTheFiguresAndTheRuntimeGoesOn) {
  Machine machine(Net::row(3).layout(), 3 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  machine.run({enter(0), exit(0), enter(1), allocate(400)});
  EXPECT_FALSE(machine.resident(0));
  EXPECT_EQ(machine.runtime->counts().pressure_evictions, 1u);
  EXPECT_EQ(message_of([&] { machine.act(allocate(200)); }),
            "out of device memory: requested 200 bytes, available 112 bytes of a budget of 768 "
            "bytes. in the forward of module 'm1': chunks in use take 256 bytes and activations "
            "and temporaries 400 bytes; the smallest budget that gets past this point is 856 "
            "bytes: raise device_memory to that or more, make the batch smaller, recompute "
            "activations (activations='auto'), or run MLPs of long sequences in tiles too "
            "(activations='recompute+tile:4')");
  EXPECT_EQ(machine.nonmodel->bytes(), 400u) << "a refusal takes nothing";
  machine.run({allocate(112), release(512), exit(1)});
  machine.runtime->move_to_host();
  EXPECT_EQ(machine.rig.device->ledger().used(), 0u);
  machine.runtime->finish_step();
  machine.train(row_step(3, 100));
  machine.train(row_step(3, 100));
  EXPECT_EQ(machine.train(row_step(3, 100)).pressure_evictions, 0u);
}

TEST(RuntimeTest, AdviceForInferenceIsNotAboutActivationsThatBackwardNeeds) {
  Machine machine(Net::row(1).layout(), kChunk, {.warmup_nonmodel_ratio = 0.0});
  machine.run({enter(0)}, PassMode::kInference);
  const std::string message = message_of([&] { machine.act(allocate(200), PassMode::kInference); });
  EXPECT_TRUE(message.ends_with(": raise device_memory to that or more, or make the batch smaller"))
      << message;
}

TEST(RuntimeTest, SmallestBudgetOfTheMessageSuffices) {
  const Step step = {enter(0), exit(0), enter(1), allocate(400), allocate(200), exit(1)};
  Machine small(Net::row(3).layout(), 855, {.warmup_nonmodel_ratio = 0.0});
  EXPECT_THROW(small.run(step), OutOfMemory);
  Machine enough(Net::row(3).layout(), 856, {.warmup_nonmodel_ratio = 0.0});
  EXPECT_NO_THROW(enough.run(step));
}

TEST(RuntimeTest, PressureInBackwardRunsOnFromHostStorage) {
  Machine machine(Net::row(2).layout(), 2 * kChunk);
  machine.run({enter(0), exit(0), enter(1), exit(1), backward(1), allocate(2 * kChunk)});
  EXPECT_EQ(machine.rig.manager->slot_bytes(), 0u);
  EXPECT_TRUE(machine.rig.bound_to_host(chunk_id(1)));
  EXPECT_TRUE(machine.rig.binder.reads(param_id(1), Rig::initial(1)));
  const std::string message = message_of([&] { machine.act(allocate(1)); });
  EXPECT_NE(message.find("outside any module: chunks in use take 0 bytes"), std::string::npos);
  machine.run({release(2 * kChunk), grad(1), backward(0), grad(0)});
  machine.runtime->finish_step();
  EXPECT_EQ(machine.state(1), TensorState::kFree);
}

TEST(RuntimeTest, OutOfMemoryInBackwardNamesItsModule) {
  Machine machine(Net::row(2).layout(), 2 * kChunk);
  machine.run({enter(0), exit(0), enter(1), exit(1), backward(1)});
  const std::string message = message_of([&] { machine.act(allocate(2 * kChunk + 1)); });
  EXPECT_NE(message.find("in the backward of module 'm1'"), std::string::npos) << message;
  EXPECT_NE(message.find("gets past this point is 513 bytes"), std::string::npos) << message;
}

TEST(RuntimeTest, EnterThatFindsNoRoomNamesItsModuleAndLeavesNothingPinned) {
  Machine machine(Net::row(2).layout(), 2 * kChunk);
  machine.act(allocate(kChunk + 1));
  const std::string forward = message_of([&] { machine.act(enter(1)); });
  EXPECT_NE(forward.find("in the forward of module 'm1'"), std::string::npos) << forward;
  EXPECT_NE(forward.find("gets past this point is 513 bytes"), std::string::npos) << forward;
  const std::string backward_message = message_of([&] { machine.act(backward(0)); });
  EXPECT_NE(backward_message.find("in the backward of module 'm0'"), std::string::npos);
  EXPECT_EQ(machine.pins(1), 0u);
  EXPECT_TRUE(machine.runtime->idle());
  machine.run({exit(1), release(kChunk + 1), enter(1)});
  EXPECT_EQ(machine.pins(1), 1u);
}

TEST(RuntimeTest, PartlyAcquiredModuleIsReleasedWhenTheRestFails) {
  Net net;
  net.add({Net::kWhole});
  net.add({Net::kWhole, Net::kWhole});
  Machine machine(net.layout(), 3 * kChunk);
  machine.act(allocate(kChunk + 1));
  EXPECT_THROW(machine.act(enter(1)), OutOfMemory);
  EXPECT_EQ(machine.pins(1), 0u);
  EXPECT_EQ(machine.pins(2), 0u);
  EXPECT_EQ(machine.rig.manager->pinned_bytes(), 0u);
  machine.run({release(kChunk + 1), enter(1), exit(1)});
  machine.runtime->finish_step();
}

TEST(RuntimeTest, PressedStepRaisesThePlansCurve) {
  Machine machine(Net::row(3).layout(), 3 * kChunk);
  machine.train(row_step(3, 0));
  const RuntimeCounts pressed = machine.train(row_step(3, 100));
  EXPECT_GT(pressed.pressure_evictions, 0u);
  EXPECT_EQ(pressed.plans, 2u);
  EXPECT_EQ(machine.runtime->trace()->peak_nonmodel_bytes(), 300u);
  const RuntimeCounts settled = machine.train(row_step(3, 100));
  EXPECT_EQ(settled.pressure_evictions, 0u);
  EXPECT_EQ(settled.plans, 2u);
}

TEST(RuntimeTest, InferenceInsideAStepDoesNotDisturbIt) {
  Machine machine(Net::row(3).layout(), 2 * kChunk);
  machine.train(row_step(3));
  const std::uint64_t signature = machine.runtime->trace()->signature();
  const Step step = row_step(3);
  const Step validation = {enter(0), exit(0), enter(1), exit(1), enter(2), exit(2)};
  for (int i = 0; i < 3; ++i) {
    for (const Act& act : step) {
      machine.act(act);
      if (act.kind == Act::Kind::kExit || act.kind == Act::Kind::kGrad) {
        machine.run(validation, PassMode::kInference);
      }
    }
    machine.runtime->finish_step();
  }
  EXPECT_EQ(machine.runtime->counts().divergent_steps, 0u);
  EXPECT_EQ(machine.runtime->counts().plans, 1u);
  EXPECT_EQ(machine.runtime->trace()->signature(), signature);
}

TEST(RuntimeTest, ModeIsThatOfTheOutermostModule) {
  Net net;
  const ModuleId outer = net.add({Net::kWhole});
  net.add({Net::kWhole}, outer);
  Machine machine(net.layout(), 2 * kChunk);
  machine.runtime->enter(module_id(0), PassMode::kTraining);
  machine.runtime->enter(module_id(1), PassMode::kInference);  // a frozen part under no_grad
  machine.run({exit(1), exit(0)});
  machine.runtime->finish_step();
  EXPECT_EQ(machine.runtime->trace()->num_accesses(), 2u);
}

TEST(RuntimeTest, EnclosingModuleStaysPinned) {
  Net net;
  const ModuleId outer = net.add({Net::kWhole});
  net.add({Net::kWhole}, outer);
  net.add({Net::kWhole}, outer);
  Machine machine(net.layout(), 2 * kChunk);
  machine.run({enter(0), enter(1), exit(1), enter(2)});
  EXPECT_EQ(machine.pins(0), 1u);
  EXPECT_EQ(machine.pins(1), 0u);
  EXPECT_EQ(machine.pins(2), 1u);
  EXPECT_FALSE(machine.resident(1));
  machine.run({exit(2), exit(0)});
  EXPECT_EQ(machine.rig.manager->pinned_bytes(), 0u);
}

TEST(RuntimeTest, ExitReleasesWhatAnExceptionLeftEntered) {
  Machine machine(Net::row(4).layout(), 4 * kChunk);
  machine.run({enter(1), enter(2), enter(3), exit(2)});
  EXPECT_EQ(machine.pins(3), 0u);
  EXPECT_EQ(machine.pins(2), 0u);
  EXPECT_EQ(machine.pins(1), 1u);
  EXPECT_EQ(machine.state(3), TensorState::kHold);
  machine.act(exit(3));  // its own, late
  EXPECT_EQ(machine.pins(1), 1u);
  machine.act(exit(1));
  EXPECT_TRUE(machine.runtime->idle());
}

TEST(RuntimeTest, EnteringTheModelReleasesWhatAnInterruptedPassLeft) {
  Machine machine(Net::row(3).layout(), 3 * kChunk);
  machine.run({enter(1), enter(2), enter(0)});
  EXPECT_EQ(machine.pins(1) + machine.pins(2), 0u);
  EXPECT_EQ(machine.pins(0), 1u);
}

TEST(RuntimeTest, MoveToHostEndsWhateverWasUnderWay) {
  Machine machine(Net::row(3).layout(), 3 * kChunk);
  machine.run({enter(0), enter(1), exit(1), exit(0), backward(1), enter(2)});
  machine.rig.binder.write(param_id(2), 123);
  machine.runtime->move_to_host();
  machine.runtime->move_to_host();
  EXPECT_EQ(machine.rig.device->ledger().used(), 0u);
  EXPECT_TRUE(machine.rig.host_storage_holds(param_id(2), 123));
  EXPECT_TRUE(machine.runtime->idle());
  machine.rig.expect_consistent();
}

TEST(RuntimeTest, RecomputedForwardInsideBackward) {
  Machine machine(Net::row(3).layout(), 2 * kChunk);
  const Step step = {enter(0), exit(0), enter(1),    exit(1), backward(1),
                     enter(0), exit(0), backward(0), grad(0), grad(1)};
  machine.train(step);
  const RuntimeCounts counts = machine.train(step);
  EXPECT_EQ(counts.divergent_steps, 0u);
  machine.run({enter(0), exit(0), enter(1), exit(1), backward(1), enter(0)});
  EXPECT_EQ(machine.state(1), TensorState::kHoldAfterBackward);
  EXPECT_EQ(machine.state(0), TensorState::kCompute);
  EXPECT_EQ(machine.pins(1), 0u) << "backward moved on";
  machine.runtime->finish_step();
}

TEST(RuntimeTest, ModuleMayEnterItself) {
  Machine machine(Net::row(2).layout(), kChunk);
  machine.run({enter(1), enter(1)});
  EXPECT_EQ(machine.pins(1), 2u);
  machine.act(exit(1));
  EXPECT_EQ(machine.pins(1), 1u);
  EXPECT_EQ(machine.state(1), TensorState::kCompute) << "still in use outside";
  machine.act(exit(1));
  EXPECT_EQ(machine.state(1), TensorState::kHold);
}

TEST(RuntimeTest, GradientsCompleteTheirChunk) {
  Net net;
  net.add({16, 16});
  net.add({Net::kWhole});
  Machine machine(net.layout(), 3 * kChunk, {.warmup_nonmodel_ratio = 0.0});
  machine.run({enter(0), exit(0), backward(0), grad(0)});
  EXPECT_EQ(machine.state(0), TensorState::kReadyForReduce);
  machine.act(grad(0));  // in parts
  EXPECT_EQ(machine.state(0), TensorState::kReadyForReduce);
  machine.act(grad(1));
  EXPECT_EQ(machine.state(0), TensorState::kCompute) << "its module is still entered";
  EXPECT_EQ(machine.state(1), TensorState::kCompute);
  machine.act(backward(1));
  EXPECT_EQ(machine.state(0), TensorState::kHoldAfterBackward);
  machine.run({grad(0), grad(1)});  // a second micro-batch
  EXPECT_EQ(machine.state(0), TensorState::kHold);
  machine.runtime->finish_step();
  std::size_t completions = 0;
  const auto trace = machine.runtime->trace();
  for (const Event& event : trace->events()) {
    completions += event.kind == EventKind::kGradReady ? 1 : 0;
  }
  EXPECT_EQ(completions, 2u);
}

TEST(RuntimeTest, GradientThatNeverComesIsForgottenAtTheEndOfTheStep) {
  Net net;
  net.add({16, 16});
  Machine machine(net.layout(), kChunk);
  machine.train({enter(0), exit(0), backward(0), grad(0)});
  EXPECT_EQ(machine.state(0), TensorState::kFree);
  machine.run({enter(0), exit(0), backward(0), grad(1)});
  EXPECT_EQ(machine.state(1), TensorState::kReadyForReduce) << "one of two again";
  machine.act(grad(0));
  EXPECT_EQ(machine.state(1), TensorState::kCompute);
}

TEST(RuntimeTest, GradientMayArriveAfterItsChunkLeft) {
  Machine machine(Net::row(3).layout(), kChunk);
  machine.run({enter(1), exit(1), enter(2), exit(2)});
  ASSERT_FALSE(machine.resident(1));
  machine.act(grad(1));
  EXPECT_EQ(machine.state(1), TensorState::kFree);
  machine.runtime->finish_step();
}

TEST(RuntimeTest, LoadedTraceReplacesTheWarmUp) {
  Machine machine(Net::row(3).layout(), 3 * kChunk, {.max_prefetch = 1});
  machine.runtime->load_trace(trace_of(row_step(3)));
  EXPECT_EQ(machine.runtime->counts().plans, 1u);
  EXPECT_EQ(machine.train(row_step(3)).demand_fetches, 1u);
  EXPECT_EQ(machine.runtime->counts().divergent_steps, 0u);
}

TEST(RuntimeTest, TraceIsNotLoadedIntoARunningStep) {
  Machine machine(Net::row(3).layout(), 3 * kChunk);
  machine.act(enter(1));
  EXPECT_THROW(machine.runtime->load_trace(trace_of(row_step(3))), UsageError);
  machine.act(exit(1));
  machine.runtime->finish_step();
  EXPECT_NO_THROW(machine.runtime->load_trace(trace_of(row_step(3))));
}

TEST(RuntimeTest, TraceOfAnotherModelChangesNothing) {
  Machine machine(Net::row(3).layout(), 3 * kChunk);
  machine.train(row_step(3));
  const std::uint64_t signature = machine.runtime->trace()->signature();
  EXPECT_THROW(machine.runtime->load_trace(trace_of(row_step(4))), InvalidArgument);
  EXPECT_EQ(machine.runtime->trace()->signature(), signature);
  EXPECT_EQ(machine.train(row_step(3)).divergent_steps, 0u);
}

TEST(RuntimeTest, FailedCopyLeavesTheRuntimeUsable) {
  for (std::size_t n = 1; n <= 8; ++n) {
    for (const bool refuse_submit : {true, false}) {
      SCOPED_TRACE((refuse_submit ? "submit " : "wait ") + std::to_string(n));
      Machine machine(Net::row(4).layout(), 3 * kChunk, {.max_prefetch = 2});
      machine.runtime->load_trace(trace_of(row_step(4)));
      const auto train = [&] {
        for (const Act& act : row_step(4)) {
          machine.act(act);
        }
      };
      if (refuse_submit) {
        machine.rig.engine.fail_submit(n);
      } else {
        machine.rig.engine.fail_wait(n);
      }
      bool failed = false;
      try {
        train();
      } catch (const InjectedFailure&) {
        failed = true;
        machine.rig.expect_consistent();
        for (std::size_t i = 0; i < 4; ++i) {
          machine.act(exit(i));
        }
      }
      try {
        machine.runtime->finish_step();
      } catch (const InjectedFailure&) {
        failed = true;
        machine.runtime->finish_step();
      }
      EXPECT_TRUE(failed || n > 5) << "five copies or so in a step";
      machine.rig.engine.never_fail();
      EXPECT_EQ(machine.rig.manager->pinned_bytes(), 0u);
      EXPECT_EQ(machine.rig.device->ledger().used(), 0u);
      EXPECT_TRUE(machine.runtime->idle());
      machine.train(row_step(4));
      for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(machine.state(i), TensorState::kFree);
        EXPECT_TRUE(machine.rig.binder.reads(param_id(i), Rig::initial(i)));
      }
    }
  }
}

TEST(RuntimeTest, UserWritesSurviveTrainingSteps) {
  Machine machine(Net::row(3).layout(), 2 * kChunk);
  std::mt19937 random(11);
  std::vector<std::uint8_t> values = {1, 2, 3};
  for (int i = 0; i < 50; ++i) {
    for (const Act& act : row_step(3)) {
      machine.act(act);
      const std::size_t param = random() % 3;
      if (random() % 4 == 0) {
        values[param] = static_cast<std::uint8_t>(random());
        machine.rig.binder.write(param_id(param), values[param]);
      }
      ASSERT_TRUE(machine.rig.binder.reads(param_id(param), values[param]));
    }
    machine.runtime->finish_step();
    for (std::size_t param = 0; param < 3; ++param) {
      ASSERT_TRUE(machine.rig.host_storage_holds(param_id(param), values[param]));
    }
  }
}

TEST(RuntimeTest, AllocationAfterTheRuntimeIsGoneSaysSo) {
  Machine machine(Net::row(1).layout(), kChunk);
  machine.act(allocate(100));
  machine.runtime.reset();
  const std::string message = message_of([&] { machine.act(allocate(kChunk)); });
  EXPECT_NE(message.find("the model that owned this budget is gone"), std::string::npos);
  machine.act(release(100));
}

// Threads allocate and free activations while modules come and go. Together they never need more
// than the budget (3 * 200 + one pinned chunk), so nobody may be refused, whoever loses a race.
TEST(RuntimeConcurrencyTest, ReclaimRacesWithEnterAndNobodyIsRefused) {
  constexpr std::size_t kBudget = 4 * kChunk;
  constexpr std::size_t kThreads = 3;
  Machine machine(Net::row(6).layout(), kBudget, {.max_prefetch = 2, .warmup_nonmodel_ratio = 0.0});
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> allocations{0};
  std::atomic<std::uint64_t> over_budget{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      while (!stop) {
        const std::size_t bytes = 1 + random() % 200;
        try {
          machine.nonmodel->allocate(bytes);
          over_budget += machine.rig.device->ledger().used() > kBudget ? 1 : 0;
          machine.nonmodel->free(bytes);
          ++allocations;
        } catch (const OutOfMemory&) {
          ++refused;
        }
      }
    });
  }
  for (int i = 0; i < 500 || allocations < 100'000; ++i) {
    try {
      machine.run(row_step(6));
      machine.runtime->finish_step();
    } catch (const OutOfMemory&) {
      ++refused;
    }
  }
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(refused, 0u);
  EXPECT_EQ(over_budget, 0u);
  EXPECT_EQ(machine.nonmodel->bytes(), 0u);
  machine.runtime->move_to_host();
  EXPECT_EQ(machine.rig.device->ledger().used(), 0u);
  machine.rig.expect_consistent();
}

}  // namespace
}  // namespace castor
