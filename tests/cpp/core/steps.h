#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "core/fakes.h"
#include "core/trace.h"

// Training steps as lists of what happens in them: the planner reads their trace, the runtime runs
// them.
namespace castor::testing {

struct Act {
  enum class Kind { kEnter, kExit, kBackward, kGrad, kAllocate, kFree };
  Kind kind;
  std::size_t value;  // a module, a parameter or bytes
};

using Step = std::vector<Act>;

inline Act enter(std::size_t module) { return {Act::Kind::kEnter, module}; }
inline Act exit(std::size_t module) { return {Act::Kind::kExit, module}; }
inline Act backward(std::size_t module) { return {Act::Kind::kBackward, module}; }
inline Act grad(std::size_t param) { return {Act::Kind::kGrad, param}; }
inline Act allocate(std::size_t bytes) { return {Act::Kind::kAllocate, bytes}; }
inline Act release(std::size_t bytes) { return {Act::Kind::kFree, bytes}; }

/// Forward and backward through the modules of Net::row(count), each leaving `activation` bytes
/// until its backward.
inline Step row_step(std::size_t count, std::size_t activation = 0) {
  Step step;
  for (std::size_t i = 0; i < count; ++i) {
    for (const Act& act : {enter(i), allocate(activation), exit(i)}) {
      step.push_back(act);  // gcc 12 warns of an overflow inside insert(list) that is none
    }
  }
  for (std::size_t i = count; i-- > 0;) {
    for (const Act& act : {backward(i), grad(i), release(activation)}) {
      step.push_back(act);
    }
  }
  return step;
}

/// A model of random nesting and random chunk sizes.
inline Net random_net(std::mt19937& random) {
  Net net;
  const std::size_t num_modules = 3 + random() % 8;
  for (std::size_t i = 0; i < num_modules; ++i) {
    std::optional<ModuleId> parent;
    if (i > 0 && random() % 3 == 0) {
      parent = module_id(random() % i);
    }
    switch (random() % 5) {
      case 0: net.add({16, 16}, parent); break;
      case 1: net.add({100}, parent); break;
      case 2: net.add({Net::kWhole, 32}, parent); break;
      case 3:
        if (!net.params.empty()) {  // tied
          net.add_sharing({param_id(random() % net.params.size())}, parent);
          break;
        }
        [[fallthrough]];
      default: net.add({Net::kWhole}, parent);
    }
  }
  return net;
}

/// A step over the modules of a net: a walk that keeps to the nesting, backward in reverse with a
/// recomputed forward here and there, activations that rise and fall.
inline Step random_step(const Net& net, std::mt19937& random) {
  std::vector<std::vector<std::size_t>> children(net.modules.size());
  std::vector<std::size_t> roots;
  for (std::size_t i = 0; i < net.modules.size(); ++i) {
    const auto& parent = net.modules[i].parent;
    (parent ? children[index(*parent)] : roots).push_back(i);
  }
  Step step;
  std::vector<std::size_t> order;
  std::vector<std::size_t> activations;
  const auto maybe_temporary = [&] {
    if (random() % 3 == 0) {
      const std::size_t bytes = random() % 500;
      step.insert(step.end(), {allocate(bytes), release(bytes)});
    }
  };
  const auto visit = [&](const auto& self, std::size_t module) -> void {
    step.push_back(enter(module));
    order.push_back(module);
    maybe_temporary();
    for (const std::size_t child : children[module]) {
      for (std::size_t times = 1 + (random() % 4 == 0 ? 1 : 0); times > 0; --times) {
        self(self, child);
      }
    }
    activations.push_back(random() % 300);
    step.push_back(allocate(activations.back()));
    maybe_temporary();
    step.push_back(exit(module));
  };
  for (const std::size_t root : roots) {
    visit(visit, root);
  }
  for (std::size_t i = order.size(); i-- > 0;) {
    if (order[i] != 0 && random() % 4 == 0) {  // checkpointed: forward runs again
      step.insert(step.end(), {enter(order[i]), exit(order[i])});
    }
    step.push_back(backward(order[i]));
    maybe_temporary();
    if (!activations.empty()) {
      step.push_back(release(activations.back()));
      activations.pop_back();
    }
  }
  for (std::size_t i = 0; i < net.params.size(); ++i) {
    step.push_back(grad(i));
  }
  return step;
}

/// The trace that a step leaves behind, by the definition in trace.h.
inline Trace trace_of(const Step& step) {
  std::vector<Event> events;
  std::uint64_t bytes = 0;
  const auto add = [&](EventKind kind, std::size_t id) {
    events.push_back({kind, static_cast<std::uint32_t>(id), bytes, events.size()});
  };
  for (const Act& act : step) {
    switch (act.kind) {
      case Act::Kind::kEnter: add(EventKind::kForwardEnter, act.value); break;
      case Act::Kind::kExit: add(EventKind::kForwardExit, act.value); break;
      case Act::Kind::kBackward: add(EventKind::kBackwardEnter, act.value); break;
      case Act::Kind::kGrad: break;  // of chunks, which the step does not know; no access anyway
      case Act::Kind::kAllocate:
        bytes += act.value;
        events.back().nonmodel_bytes = std::max(events.back().nonmodel_bytes, bytes);
        break;
      case Act::Kind::kFree: bytes -= act.value; break;
    }
  }
  return Trace(std::move(events));
}

}  // namespace castor::testing
