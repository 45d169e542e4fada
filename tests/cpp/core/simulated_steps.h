#pragma once

#include <cstddef>
#include <random>
#include <utility>
#include <vector>

#include "core/fakes.h"
#include "core/simulator.h"
#include "core/steps.h"

// Steps whose time can be said beforehand, and random ones, for the simulator.
namespace castor::testing {

inline constexpr std::size_t kChunk = Net::kChunk;
inline constexpr double kMoved = 28.0;                        // bytes an element, fp32
inline constexpr double kUpdateBytes = Net::kWhole * kMoved;  // of one chunk

// A link of one chunk a second, DRAM of one update a second.
inline Hardware unit_hardware() {
  return {.h2d_bytes_per_second = kChunk,
          .d2h_bytes_per_second = kChunk,
          .dram_bytes_per_second = kUpdateBytes,
          .device_memory_bytes_per_second = 10 * kUpdateBytes};
}

inline OptimizerCost fp32_adam(Overlap overlap = Overlap::kNone) {
  return {.state_bytes_per_element = 8.0, .moved_bytes_per_element = kMoved, .overlap = overlap};
}

/// Forward of a second and backward of two a module, in a row; a gradient after each backward.
struct Row {
  std::size_t count;
  std::uint64_t nonmodel_bytes = 0;
  double forward_seconds = 1.0;
  double backward_seconds = 2.0;

  [[nodiscard]] Trace trace() const {
    std::vector<Event> events;
    const auto add = [&](EventKind kind, std::size_t id) {
      events.push_back({kind, static_cast<std::uint32_t>(id), nonmodel_bytes, events.size()});
    };
    for (std::size_t i = 0; i < count; ++i) {
      add(EventKind::kForwardEnter, i);
      add(EventKind::kForwardExit, i);
    }
    for (std::size_t i = count; i-- > 0;) {
      add(EventKind::kBackwardEnter, i);
      add(EventKind::kGradReady, i);
    }
    return Trace(std::move(events));
  }
  [[nodiscard]] std::vector<double> durations() const {
    std::vector<double> seconds;
    const Trace steps = trace();
    for (const Event& event : steps.events()) {
      seconds.push_back(event.kind == EventKind::kForwardEnter    ? forward_seconds
                        : event.kind == EventKind::kBackwardEnter ? backward_seconds
                                                                  : 0.0);
    }
    return seconds;
  }
};

inline SimulatedStep simulate(const Row& row, std::size_t budget, const Hardware& hardware,
                              const OptimizerCost& optimizer, std::size_t max_prefetch = 1,
                              std::vector<Placement> placements = {},
                              const StoredPayloads& stored = {}) {
  const ChunkLayout layout = Net::row(row.count).layout();
  placements.resize(row.count, Placement::kStream);
  std::size_t fixed = 0;
  for (std::size_t i = 0; i < row.count; ++i) {
    fixed += placements[i] == Placement::kDevice ? payload_bytes(layout.chunks()[i], optimizer) : 0;
  }
  const Plan plan = make_plan(
      row.trace(), layout, placements,
      {.device_budget_bytes = budget, .fixed_device_bytes = fixed, .max_prefetch = max_prefetch});
  return simulate_step(row.trace(), row.durations(), layout, placements, plan, hardware, optimizer,
                       stored);
}

inline double busy(const SimulatedStep& step, Resource resource) {
  return step.busy_seconds[static_cast<std::size_t>(resource)];
}

struct RandomCase {
  Net net;
  ChunkLayout layout;
  std::vector<Placement> placements;
  Trace trace;
  std::vector<double> durations;
  Plan plan;

  static RandomCase make(std::mt19937& random) {
    Net net = random_net(random);
    ChunkLayout layout = net.layout();
    std::vector<Placement> placements;
    for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
      placements.push_back(static_cast<Placement>(random() % 8 == 0 ? 1 + random() % 2 : 0));
    }
    std::vector<Event> events = trace_of(random_step(net, random)).events();
    for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
      events.push_back({EventKind::kGradReady, static_cast<std::uint32_t>(i), 0, events.size()});
    }
    Trace trace(std::move(events));
    std::vector<double> durations;
    for (std::size_t i = 0; i < trace.events().size(); ++i) {
      durations.push_back(static_cast<double>(random() % 1000) / 1000.0);
    }
    Plan plan =
        make_plan(trace, layout, placements,
                  {.device_budget_bytes = 600 + random() % 3000, .max_prefetch = random() % 4});
    return {std::move(net),   std::move(layout),    std::move(placements),
            std::move(trace), std::move(durations), std::move(plan)};
  }
  [[nodiscard]] SimulatedStep run(const Hardware& hardware, const OptimizerCost& cost,
                                  const StoredPayloads& stored = {}) const {
    return simulate_step(trace, durations, layout, placements, plan, hardware, cost, stored);
  }
};

inline Hardware random_hardware(std::mt19937& random) {
  const auto speed = [&] { return 100.0 + static_cast<double>(random() % 5000); };
  Hardware hardware{speed(), speed(), speed(), speed()};
  hardware.update_bytes_per_second = random() % 2 == 0 ? 0.0 : speed();
  hardware.parameter_copies = static_cast<CopyMode>(random() % 2);
  hardware.gradient_copies = static_cast<CopyMode>(random() % 2);
  hardware.update_cores = static_cast<UpdateCores>(random() % 2);
  return hardware;
}

}  // namespace castor::testing
