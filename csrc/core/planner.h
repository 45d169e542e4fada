#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/placement.h"
#include "core/trace.h"

namespace castor {

struct PlanOptions {
  std::size_t device_budget_bytes = 0;
  /// Bytes of payloads that are resident on the device for good (Placement::kDevice).
  std::size_t fixed_device_bytes = 0;
  /// Number of chunks that may be fetched ahead of their use; 0 turns prefetching off.
  std::size_t max_prefetch = 1;
  /// Placement policy. kCpu: keep nothing between uses, except between a block's recomputation and
  /// its backward, and what prefetching would fetch again at once. kAuto and the others: keep what
  /// fits.
  PlacementPolicy policy = PlacementPolicy::kAuto;
};

/// A chunk to bring in ahead of the access that uses it.
struct Prefetch {
  ChunkId chunk{};
  std::uint64_t used_at = 0;
  /// Bytes that slots may take with the chunk: the smallest cap of the accesses until its use.
  std::size_t slot_cap_bytes = 0;
};

/// Plan of one access (a forward or backward enter).
struct PlannedAccess {
  ModuleId module{};
  EventKind kind = EventKind::kForwardEnter;
  std::size_t first_next_use = 0;
  std::size_t first_prefetch = 0;
  std::size_t num_prefetches = 0;
  /// Bytes that slots may take until the next access, so that the non-model bytes fit beside them.
  std::size_t slot_cap_bytes = 0;
};

/// Prediction that the planner's simulation of the step makes.
struct Prediction {
  /// Highest sum of chunks, fixed payloads and non-model bytes.
  std::size_t peak_device_bytes = 0;
  /// Smallest budget under which every access can pin what it needs beside the non-model bytes.
  std::size_t smallest_budget_bytes = 0;
  ModuleId smallest_budget_module{};
  std::uint64_t h2d_bytes = 0;
  std::uint64_t demand_fetches = 0;
  std::uint64_t prefetches = 0;
  std::uint64_t evictions = 0;
};

/// Plan of a step. Immutable. Accesses are numbered in the order of the step; next uses are access
/// numbers.
class Plan {
 public:
  [[nodiscard]] const std::vector<PlannedAccess>& accesses() const noexcept { return accesses_; }
  /// Returns the next uses of the access's chunks, parallel to
  /// ChunkLayout::chunks_of(access.module).
  [[nodiscard]] std::span<const std::uint64_t> next_uses(const PlannedAccess& access,
                                                         std::size_t num_chunks) const {
    return std::span(next_uses_).subspan(access.first_next_use, num_chunks);
  }
  [[nodiscard]] std::span<const Prefetch> prefetches(const PlannedAccess& access) const {
    return std::span(prefetches_).subspan(access.first_prefetch, access.num_prefetches);
  }
  [[nodiscard]] const Prediction& prediction() const noexcept { return prediction_; }

 private:
  friend class Planner;
  std::vector<PlannedAccess> accesses_;
  std::vector<std::uint64_t> next_uses_;
  std::vector<Prefetch> prefetches_;
  Prediction prediction_;
};

/// Turns a trace into a plan. A pure function: no clock, no I/O, no threads; equal inputs give
/// equal plans. O(accesses log chunks). A DryRun decides pins and evictions. A chunk is prefetched
/// as early as max_prefetch and the budget of all accesses in between allow.
/// An access that cannot fit is planned as if it could: running it raises OutOfMemory, and
/// prediction().smallest_budget_bytes is the budget that would do.
/// Throws InvalidArgument when the trace names a module that the layout lacks.
[[nodiscard]] Plan make_plan(const Trace& trace, const ChunkLayout& layout,
                             std::span<const Placement> placements, const PlanOptions& options);

/// Returns the module of the access that is `ahead` accesses on, from 0; nullopt: there are no
/// more.
using UpcomingModule = std::function<std::optional<ModuleId>(std::size_t ahead)>;

/// Returns the upcoming modules of a plan from access number `first` on; borrows the plan.
[[nodiscard]] UpcomingModule upcoming_modules(const Plan& plan, std::size_t first);

/// Returns the chunks that the coming accesses use, in the order of use, each once. They are at
/// most `most` chunks that `wanted` accepts, and none of an access further than 64 ahead.
[[nodiscard]] std::vector<ChunkId> upcoming_chunks(const UpcomingModule& upcoming,
                                                   const ChunkLayout& layout, std::size_t most,
                                                   const std::function<bool(ChunkId)>& wanted);

}  // namespace castor
