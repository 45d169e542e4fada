#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/placement.h"
#include "core/planner.h"
#include "core/trace.h"

namespace castor {

struct HybridOptions {
  /// Options of the plan without promotions; fixed_device_bytes leaves promoted chunks out.
  PlanOptions plan;
  /// Share, in [0, 1], that promotions may take of the budget left beside non-model data at its
  /// peak.
  double margin_ratio = 1.0;
};

/// Chunks to make resident on the device with all their payloads.
struct Promotions {
  std::vector<ChunkId> chunks;  ///< the most wanted first
  std::size_t bytes = 0;        ///< device bytes that they take for good
};

/// Chooses which of the streamed chunks in `candidates`, one entry per chunk, to promote: to make
/// resident on the device for good. A promoted chunk is never fetched, its gradients do not cross
/// the link, and its optimizer runs on the device. `device_bytes` has the bytes that each chunk
/// would take.
///
/// First come the chunks whose gradients arrive last: nothing hides their updates, and the next
/// forward needs them first. Chunks without gradients follow, in order of first use. A chunk is
/// promoted only where the plan of the others gets no worse by it. That plan keeps to the budget,
/// fetches no more bytes in a step and waits for no more fetches than the plan without promotions.
/// A chunk that does not pass is left out, and those after it are tried. Chunks that are read on
/// the host (read_on_host) are no candidates.
///
/// A pure function, deterministic. Runs the planner O(log chunks) times for each chunk that is left
/// out, but no more often than kMaxPlannedAccesses allows. Promotes nothing under another policy
/// than kAuto, or where the plan without promotions exceeds its budget. Throws as make_plan does;
/// InvalidArgument where sizes differ or the ratio is out of range.
[[nodiscard]] Promotions choose_promotions(const Trace& trace, const ChunkLayout& layout,
                                           std::span<const Placement> placements,
                                           std::span<const std::size_t> device_bytes,
                                           const std::vector<bool>& candidates,
                                           const HybridOptions& options);

/// Most accesses that choose_promotions plans in all, about a second's work. But the planner runs
/// at least kMinPlannerRuns and at most kMaxPlannerRuns times.
inline constexpr std::size_t kMaxPlannedAccesses = std::size_t{1} << 22;
inline constexpr std::size_t kMinPlannerRuns = 8;
inline constexpr std::size_t kMaxPlannerRuns = 96;

}  // namespace castor
