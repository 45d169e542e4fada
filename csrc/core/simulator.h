#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/hardware.h"
#include "core/placement.h"
#include "core/planner.h"
#include "core/simulated_nvme.h"
#include "core/trace.h"

namespace castor {

/// What a step takes. Times are seconds.
struct SimulatedStep {
  double step_seconds = 0.0;
  /// Of these, until the last gradient is at home: without norm, and updates that follow.
  double passes_seconds = 0.0;
  /// By Resource. kH2d and kD2h: bytes over the link's speed; kDram: bytes of updates, norm and
  /// links over DRAM's speed; kNvme: payloads read and written over its speed.
  std::array<double, kNumResources> busy_seconds{};
  /// Busy for longer than the others; the first of equals.
  Resource bound = Resource::kCompute;
  std::uint64_t peak_device_bytes = 0;
  /// Payloads whose home is the host; constant over the step.
  std::uint64_t host_bytes = 0;
  /// Payloads on NVMe.
  std::uint64_t nvme_bytes = 0;
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  std::uint64_t demand_fetches = 0;
  std::uint64_t evictions = 0;
};

/// Simulates one steady step of a plan: the runtime's decisions (same plan, same eviction
/// order) and, for each resource, a queue served in order of submission. A pure function of its
/// arguments, O(accesses log chunks): no clock, no threads.
///
/// `compute_seconds` has one entry for each event of the trace: what runs until the next one,
/// without any copies.
/// A grad-ready event sends the chunk's gradients home. Because each queue serves in order and
/// decisions do not depend on time, no faster resource makes a step slower; and no step is shorter
/// than what any resource is busy for.
///
/// Not modelled: kernels launched ahead, allocator time, the wait for a free slot of a window on
/// NVMe, and the slowdown of copies and updates that use DRAM at the same time, other than that
/// DRAM cannot move more than its bandwidth in all.
///
/// Throws InvalidArgument when the plan is of another trace, sizes differ, a speed is not above 0,
/// a cost or time is negative or not finite, or what SimulatedNvme refuses.
[[nodiscard]] SimulatedStep simulate_step(const Trace& trace,
                                          std::span<const double> compute_seconds,
                                          const ChunkLayout& layout,
                                          std::span<const Placement> placements, const Plan& plan,
                                          const Hardware& hardware, const OptimizerCost& optimizer,
                                          const StoredPayloads& stored = {});

}  // namespace castor
