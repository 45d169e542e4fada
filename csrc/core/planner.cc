#include "core/planner.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/dry_run.h"
#include "core/error.h"

namespace castor {

/// One planning run: a dry run over the trace that decides, access by access, what comes ahead.
class Planner final : private DryRun {
 public:
  Planner(const Trace& trace, const ChunkLayout& layout, std::span<const Placement> placements,
          const PlanOptions& options)
      : DryRun(layout, placements, plan_),
        trace_(trace),
        layout_(layout),
        options_(options),
        awaits_backward_(layout.chunks().size(), false) {}

  Plan run() {
    list_accesses();
    find_next_uses();
    set_caps();
    for (const Event& event : trace_.events()) {
      step(event);
    }
    plan_.prediction_.h2d_bytes = h2d_bytes();
    plan_.prediction_.demand_fetches = demand_fetches();
    plan_.prediction_.evictions = evictions();
    return std::move(plan_);
  }

 private:
  void list_accesses() {
    for (const Event& event : trace_.events()) {
      if (event.kind != EventKind::kGradReady && event.id >= layout_.modules().size()) {
        throw InvalidArgument("the trace names module " + std::to_string(event.id) +
                              ", but the model has " + std::to_string(layout_.modules().size()) +
                              "; it was recorded for another model");
      }
      if (event.is_access()) {
        PlannedAccess access;
        access.module = ModuleId{event.id};
        access.kind = event.kind;
        plan_.accesses_.push_back(access);
        nonmodel_.push_back(event.nonmodel_bytes);
      } else if (!nonmodel_.empty()) {
        nonmodel_.back() = std::max<std::size_t>(nonmodel_.back(), event.nonmodel_bytes);
      }
    }
  }

  void find_next_uses() {
    std::size_t total = 0;
    for (PlannedAccess& access : plan_.accesses_) {
      access.first_next_use = total;
      total += layout_.chunks_of(access.module).size();
    }
    plan_.next_uses_.resize(total);
    std::vector<std::uint64_t> next(layout_.chunks().size(), kNeverUsed);
    for (std::size_t i = plan_.accesses_.size(); i-- > 0;) {
      const PlannedAccess& access = plan_.accesses_[i];
      std::size_t entry = access.first_next_use;
      for (const ChunkId chunk : layout_.chunks_of(access.module)) {
        plan_.next_uses_[entry++] = next[index(chunk)];
        next[index(chunk)] = i;
      }
    }
  }

  void set_caps() {
    for (std::size_t i = 0; i < plan_.accesses_.size(); ++i) {
      const std::size_t taken = nonmodel_[i] + options_.fixed_device_bytes;
      const std::size_t budget = options_.device_budget_bytes;
      plan_.accesses_[i].slot_cap_bytes = budget > taken ? budget - taken : 0;
    }
  }

  void begin_access() override {
    note_recomputed();
    if (options_.policy == PlacementPolicy::kCpu) {
      PlannedAccess& access = plan_.accesses_[now()];
      access.slot_cap_bytes = std::min(access.slot_cap_bytes, held_and_ahead_bytes());
    }
  }

  void fetched(ChunkId /*chunk*/) override { note_peak(nonmodel_at_entry()); }

  void fetch_ahead() override {
    note_need();
    prefetch();
    note_peak(nonmodel_[now()]);
  }

  /// At most: what an access finds lies under its own curve and that of the access before.
  [[nodiscard]] std::size_t nonmodel_at_entry() const {
    return now() == 0 ? nonmodel_[0] : std::min(nonmodel_[now() - 1], nonmodel_[now()]);
  }

  void note_peak(std::size_t nonmodel_bytes) {
    plan_.prediction_.peak_device_bytes =
        std::max(plan_.prediction_.peak_device_bytes,
                 residency().slot_bytes() + nonmodel_bytes + options_.fixed_device_bytes);
  }

  void note_need() {
    const std::size_t need =
        residency().held_bytes() + nonmodel_[now()] + options_.fixed_device_bytes;
    if (need > plan_.prediction_.smallest_budget_bytes) {
      plan_.prediction_.smallest_budget_bytes = need;
      plan_.prediction_.smallest_budget_module = plan_.accesses_[now()].module;
    }
  }

  /// Notes which chunks a block's second forward used, in backward, and its backward is about to.
  void note_recomputed() {
    const PlannedAccess& access = plan_.accesses_[now()];
    const bool forward = access.kind == EventKind::kForwardEnter;
    if (!forward) {
      in_backward_ = true;
    } else if (access.module == plan_.accesses_.front().module) {
      in_backward_ = false;  // the next pass
    }
    for (const ChunkId chunk : layout_.chunks_of(access.module)) {
      awaits_backward_[index(chunk)] = forward && in_backward_;
    }
  }

  /// Returns the bytes that PlacementPolicy::kCpu lets slots take: of chunks that stay while this
  /// access computes, of those that a recomputed block's backward uses again, and of those that
  /// prefetching may add: the next ones that later accesses use. One of these that is there already
  /// stays, since it would be fetched again at once.
  [[nodiscard]] std::size_t held_and_ahead_bytes() const {
    const auto& needed = layout_.chunks_of(plan_.accesses_[now()].module);
    std::size_t bytes = residency().held_bytes();
    for (const ChunkId chunk : needed) {
      bytes += moves(chunk) && !residency().held(chunk) ? residency().capacity(chunk) : 0;
    }
    const auto counted = [&](ChunkId chunk) {
      return !moves(chunk) || residency().held(chunk) ||
             std::binary_search(needed.begin(), needed.end(), chunk);
    };
    for (std::size_t i = 0; i < awaits_backward_.size(); ++i) {
      const ChunkId chunk{static_cast<std::uint32_t>(i)};
      bytes += awaits_backward_[i] && !counted(chunk) ? residency().capacity(chunk) : 0;
    }
    std::vector<ChunkId> ahead;
    const std::size_t end = end_of_lookahead();
    for (std::size_t i = now() + 1; i < end && ahead.size() < options_.max_prefetch; ++i) {
      for (const ChunkId chunk : layout_.chunks_of(plan_.accesses_[i].module)) {
        if (ahead.size() < options_.max_prefetch && !counted(chunk) &&
            !awaits_backward_[index(chunk)] &&
            std::find(ahead.begin(), ahead.end(), chunk) == ahead.end()) {
          bytes += residency().capacity(chunk);
          ahead.push_back(chunk);
        }
      }
    }
    return bytes;
  }

  /// Brings in what the next accesses miss, while it fits under the caps of every access until
  /// then. A prefetch that does not fit evicts nothing.
  void prefetch() {
    PlannedAccess& access = plan_.accesses_[now()];
    access.first_prefetch = plan_.prefetches_.size();
    const std::size_t end = end_of_lookahead();
    std::size_t cap = access.slot_cap_bytes;
    for (std::size_t i = now() + 1; i < end && access.num_prefetches < options_.max_prefetch; ++i) {
      cap = std::min(cap, plan_.accesses_[i].slot_cap_bytes);
      for (const ChunkId chunk : layout_.chunks_of(plan_.accesses_[i].module)) {
        if (residency().resident(chunk)) {
          continue;
        }
        if (access.num_prefetches == options_.max_prefetch || !could_fetch_for(chunk, i, cap)) {
          return;
        }
        fetch_for(chunk, i, cap);
        plan_.prefetches_.push_back({chunk, i, cap});
        ++access.num_prefetches;
        ++plan_.prediction_.prefetches;
      }
    }
  }

  /// Returns the number of the first access that prefetching does not look at yet.
  [[nodiscard]] std::size_t end_of_lookahead() const {
    return std::min(plan_.accesses_.size(), now() + 1 + options_.max_prefetch * kLookahead);
  }

  [[nodiscard]] bool moves(ChunkId chunk) const { return !residency().on_device(chunk); }

  // A prefetch looks this many accesses ahead per chunk: most accesses hit a chunk that is there.
  static constexpr std::size_t kLookahead = 8;

  const Trace& trace_;
  const ChunkLayout& layout_;
  const PlanOptions& options_;
  Plan plan_;
  std::vector<std::size_t> nonmodel_;  // per access
  bool in_backward_ = false;
  std::vector<bool> awaits_backward_;  // per chunk
};

Plan make_plan(const Trace& trace, const ChunkLayout& layout, std::span<const Placement> placements,
               const PlanOptions& options) {
  return Planner(trace, layout, placements, options).run();
}

UpcomingModule upcoming_modules(const Plan& plan, std::size_t first) {
  return [&accesses = plan.accesses(), first](std::size_t ahead) {
    return first + ahead < accesses.size() ? std::optional(accesses[first + ahead].module)
                                           : std::nullopt;
  };
}

std::vector<ChunkId> upcoming_chunks(const UpcomingModule& upcoming, const ChunkLayout& layout,
                                     std::size_t most, const std::function<bool(ChunkId)>& wanted) {
  constexpr std::size_t kAccesses = 64;
  std::vector<ChunkId> chunks;
  for (std::size_t i = 0; i < kAccesses; ++i) {
    const std::optional<ModuleId> module = upcoming(i);
    if (!module) {
      break;
    }
    for (const ChunkId chunk : layout.chunks_of(*module)) {
      if (chunks.size() == most) {
        return chunks;
      }
      if (wanted(chunk) && std::find(chunks.begin(), chunks.end(), chunk) == chunks.end()) {
        chunks.push_back(chunk);
      }
    }
  }
  return chunks;
}

}  // namespace castor
