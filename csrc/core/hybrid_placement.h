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
  /// Of the plan without promotions; fixed_device_bytes leaves promoted chunks out.
  PlanOptions plan;
  /// Share of what non-model data at its peak leaves of the budget that promotions may take, in
  /// [0, 1].
  double margin_ratio = 1.0;
};

/// Chunks that had better live on the device with all their payloads, and what that comes to.
struct Promotions {
  std::vector<ChunkId> chunks;  ///< the most wanted first
  std::size_t bytes = 0;        ///< of the device, for good
};

/// Chooses among `candidates`, one entry per chunk, which of the streamed chunks to promote, that
/// is to give memory on the device for good: they are never fetched, their gradients do not cross
/// the link, and their optimizer runs where they lie. `device_bytes` is what each would take.
///
/// First come the chunks whose gradients arrive last, whose updates nothing hides and which the
/// next forward needs first; then chunks without gradients, in order of first use. A chunk is
/// promoted only where the plan of the others gets no worse by it: the whole keeps to the budget,
/// no more bytes are fetched in a step and no more fetches are waited for than without promotions.
/// One that does not pass is left out, and those after it are tried. Chunks that are read at home
/// are no candidates.
///
/// A pure function, deterministic. Runs the planner O(log chunks) times for each chunk that is left
/// out, but no more often than kMaxPlannedAccesses allows. Promotes nothing under another policy
/// than kAuto, or where the plan exceeds its budget as it is. Throws as make_plan does;
/// InvalidArgument where sizes differ or the ratio is out of range.
[[nodiscard]] Promotions choose_promotions(const Trace& trace, const ChunkLayout& layout,
                                           std::span<const Placement> placements,
                                           std::span<const std::size_t> device_bytes,
                                           const std::vector<bool>& candidates,
                                           const HybridOptions& options);

/// Accesses that choose_promotions plans in all, about a second's work; but at least
/// kMinPlannerRuns times and at most kMaxPlannerRuns times those of the trace.
inline constexpr std::size_t kMaxPlannedAccesses = std::size_t{1} << 22;
inline constexpr std::size_t kMinPlannerRuns = 8;
inline constexpr std::size_t kMaxPlannerRuns = 96;

}  // namespace castor
