#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/fakes.h"
#include "core/nonmodel_memory.h"
#include "core/runtime.h"
#include "core/steps.h"

namespace castor::testing {

/// A runtime on simulated hardware whose clock the test sets; each look takes 1 ns.
struct SimulatedMachine {
  Rig rig;
  std::shared_ptr<NonModelMemory> nonmodel = std::make_shared<NonModelMemory>(rig.device);
  std::uint64_t now_ns = 1000;
  std::unique_ptr<Runtime> runtime;

  SimulatedMachine(ChunkLayout layout, std::size_t device_bytes, RuntimeOptions options = {},
                   std::vector<Placement> placements = {}, std::vector<bool> stored = {})
      : rig(std::move(layout), device_bytes, std::move(placements), std::move(stored)) {
    runtime =
        std::make_unique<Runtime>(*rig.manager, nonmodel, options, [this] { return now_ns++; });
  }
  /// One of several models on a device.
  SimulatedMachine(ChunkLayout layout, std::shared_ptr<Budget> budget, std::string owner,
                   std::shared_ptr<RuntimeGroup> group, RuntimeOptions options = {},
                   std::vector<Placement> placements = {})
      : rig(std::move(layout), std::move(budget), std::move(owner), std::move(placements)) {
    runtime = std::make_unique<Runtime>(
        *rig.manager, nonmodel, options, [this] { return now_ns++; }, std::move(group));
  }
  /// Another runtime in place of the first, whose device works beside the host.
  void work_by(std::unique_ptr<DeviceClock> clock, RuntimeOptions options = {}) {
    runtime.reset();
    runtime = std::make_unique<Runtime>(
        *rig.manager, nonmodel, options, [this] { return now_ns++; }, nullptr, std::move(clock));
  }
  SimulatedMachine(const SimulatedMachine&) = delete;
  SimulatedMachine& operator=(const SimulatedMachine&) = delete;
  /// Frees the activations that a test left: the ledger asserts that nothing outlives it.
  ~SimulatedMachine() {
    runtime.reset();
    nonmodel->free(nonmodel->bytes());
  }

  void act(const Act& act, PassMode mode = PassMode::kTraining) {
    switch (act.kind) {
      case Act::Kind::kEnter: return runtime->enter(module_id(act.value), mode);
      case Act::Kind::kExit: return runtime->exit(module_id(act.value));
      case Act::Kind::kBackward: return runtime->enter_backward(module_id(act.value));
      case Act::Kind::kGrad: static_cast<void>(runtime->grad_ready(param_id(act.value))); return;
      case Act::Kind::kAllocate: return nonmodel->allocate(act.value);
      case Act::Kind::kFree: return nonmodel->free(act.value);
    }
  }
  void run(const Step& step, PassMode mode = PassMode::kTraining) {
    for (const Act& act : step) {
      this->act(act, mode);
    }
  }
};

}  // namespace castor::testing
