#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/nonmodel_memory.h"
#include "core/runtime.h"
#include "core/steps.h"

namespace castor::testing {

/// A runtime on simulated hardware, with a clock that ticks once a look.
struct Machine {
  Rig rig;
  std::shared_ptr<NonModelMemory> nonmodel = std::make_shared<NonModelMemory>(rig.device);
  std::uint64_t now_ns = 0;
  std::unique_ptr<Runtime> runtime;

  Machine(ChunkLayout layout, std::size_t device_bytes, RuntimeOptions options = {},
          std::vector<Placement> placements = {})
      : rig(std::move(layout), device_bytes, std::move(placements)) {
    runtime =
        std::make_unique<Runtime>(*rig.manager, nonmodel, options, [this] { return ++now_ns; });
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  /// Frees the activations that a test left: the ledger asserts that nothing outlives it.
  ~Machine() {
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

inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const OutOfMemory& error) {
    return error.what();
  }
  return "no throw";
}

}  // namespace castor::testing
