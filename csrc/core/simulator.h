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

/// Result of a simulated step. Times are seconds.
struct SimulatedStep {
  double step_seconds = 0.0;
  /// Seconds until the last gradient is in host storage: without norm, and updates that follow.
  double passes_seconds = 0.0;
  /// Busy seconds by Resource. kH2d and kD2h: bytes over the link's speed; kDram: bytes of updates,
  /// norm and links over DRAM's speed; kNvme: payloads read and written over its speed.
  std::array<double, kNumResources> busy_seconds{};
  /// Resource that is busy for longer than the others; the first of equals.
  Resource bound = Resource::kCompute;
  std::uint64_t peak_device_bytes = 0;
  /// Bytes of payloads in host storage; constant over the step.
  std::uint64_t host_bytes = 0;
  /// Bytes of payloads on NVMe.
  std::uint64_t nvme_bytes = 0;
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  std::uint64_t demand_fetches = 0;
  std::uint64_t evictions = 0;
};

/// Simulates one steady step of a plan: the runtime's decisions (same plan, same eviction order)
/// and, for each resource, a queue served in order of submission. A pure function of its arguments,
/// O(accesses log chunks): no clock, no threads.
///
/// `compute_seconds` has one entry for each event of the trace: the seconds of computing until the
/// next event, without any copies. A grad-ready event sends the chunk's gradients to host storage.
/// Each queue serves in order and decisions do not depend on time, so no faster resource makes a
/// step slower. No step is shorter than the busy time of any resource.
///
/// Not modelled: kernels launched ahead, allocator time, the wait for a free window buffer on NVMe,
/// and the slowdown of copies and updates that use DRAM at the same time. These two are only bound
/// by the bandwidth of DRAM in all.
///
/// Throws InvalidArgument when the plan is of another trace, sizes differ, a speed is not above 0,
/// or a cost or time is negative or not finite. Also throws it when SimulatedNvme refuses its
/// arguments.
[[nodiscard]] SimulatedStep simulate_step(const Trace& trace,
                                          std::span<const double> compute_seconds,
                                          const ChunkLayout& layout,
                                          std::span<const Placement> placements, const Plan& plan,
                                          const Hardware& hardware, const OptimizerCost& optimizer,
                                          const StoredPayloads& stored = {});

}  // namespace castor
