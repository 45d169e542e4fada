#include "core/planner.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {

/// One planning run: a simulation of the step over the trace, with the same eviction order that the
/// chunk manager uses.
class Planner {
 public:
  Planner(const Trace& trace, const ChunkLayout& layout, std::span<const Placement> placements,
          const PlanOptions& options)
      : trace_(trace),
        layout_(layout),
        placements_(placements),
        options_(options),
        chunks_(layout.chunks().size()),
        evictable_(layout.chunks().size()) {}

  Plan run() {
    list_accesses();
    find_next_uses();
    set_caps();
    simulate();
    return std::move(plan_);
  }

 private:
  struct ChunkState {
    bool resident = false;
    bool kept = false;  // Placement::kKeep, and used in this step
    std::uint32_t pins = 0;
    std::uint64_t next_use = kNeverUsed;
  };

  [[nodiscard]] std::size_t capacity(ChunkId chunk) const {
    return layout_.chunk(chunk).capacity_bytes;
  }
  [[nodiscard]] bool moves(ChunkId chunk) const {
    return placements_[index(chunk)] != Placement::kDevice;
  }

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
    std::vector<std::uint64_t> next(chunks_.size(), kNeverUsed);
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

  void simulate() {
    std::size_t access = 0;
    for (const Event& event : trace_.events()) {
      switch (event.kind) {
        case EventKind::kForwardEnter:
          leave_backward();
          if (event.id == 0) {  // the model: the runtime releases what was left entered
            frames_.clear();
            unpin_from(&stack_, 0);
          }
          enter(access++, &stack_);
          frames_.push_back(ModuleId{event.id});
          break;
        case EventKind::kForwardExit: exit(ModuleId{event.id}); break;
        case EventKind::kBackwardEnter:
          leave_backward();
          enter(access++, &backward_);
          break;
        case EventKind::kGradReady: break;
      }
    }
  }

  void enter(std::size_t now, std::vector<ChunkId>* pins) {
    PlannedAccess& access = plan_.accesses_[now];
    const auto& needed = layout_.chunks_of(access.module);
    const auto next_uses = plan_.next_uses(access, needed.size());
    std::vector<ChunkId> missing;
    for (std::size_t i = 0; i < needed.size(); ++i) {
      chunks_[index(needed[i])].next_use = next_uses[i];
      if (moves(needed[i])) {
        pin(needed[i], pins);
        if (!chunks_[index(needed[i])].resident) {
          missing.push_back(needed[i]);
        }
      }
    }
    if (options_.policy == PlacementPolicy::kCpu) {
      access.slot_cap_bytes = std::min(access.slot_cap_bytes, pinned_bytes_ + ahead_bytes(now));
    }
    for (const ChunkId chunk : missing) {
      make_room(capacity(chunk), access.slot_cap_bytes, now, 0);
      fetch(chunk);
      ++plan_.prediction_.demand_fetches;
      note_peak(nonmodel_at_entry(now));
    }
    // Also without a fetch: the non-model bytes of this access may need the room.
    make_room(0, access.slot_cap_bytes, now, 0);
    note_need(access, now);
    prefetch(now);
    note_peak(nonmodel_[now]);
  }

  /// At most: what an access finds lies under its own curve and that of the access before.
  [[nodiscard]] std::size_t nonmodel_at_entry(std::size_t now) const {
    return now == 0 ? nonmodel_[0] : std::min(nonmodel_[now - 1], nonmodel_[now]);
  }

  void note_peak(std::size_t nonmodel_bytes) {
    plan_.prediction_.peak_device_bytes =
        std::max(plan_.prediction_.peak_device_bytes,
                 slot_bytes_ + nonmodel_bytes + options_.fixed_device_bytes);
  }

  void note_need(const PlannedAccess& access, std::size_t now) {
    const std::size_t need = pinned_bytes_ + nonmodel_[now] + options_.fixed_device_bytes;
    if (need > plan_.prediction_.smallest_budget_bytes) {
      plan_.prediction_.smallest_budget_bytes = need;
      plan_.prediction_.smallest_budget_module = access.module;
    }
  }

  /// Bytes of the chunks that prefetching may add to the pinned ones under PlacementPolicy::kCpu.
  [[nodiscard]] std::size_t ahead_bytes(std::size_t now) const {
    std::size_t bytes = 0;
    std::size_t left = options_.max_prefetch;
    for (std::size_t i = now + 1; i < plan_.accesses_.size() && i <= now + options_.max_prefetch;
         ++i) {
      for (const ChunkId chunk : layout_.chunks_of(plan_.accesses_[i].module)) {
        if (left > 0 && moves(chunk) && chunks_[index(chunk)].pins == 0) {
          bytes += capacity(chunk);
          --left;
        }
      }
    }
    return bytes;
  }

  /// Brings in what the next accesses miss, while it fits under the caps of every access until
  /// then.
  void prefetch(std::size_t now) {
    PlannedAccess& access = plan_.accesses_[now];
    access.first_prefetch = plan_.prefetches_.size();
    const std::size_t end =
        std::min(plan_.accesses_.size(), now + 1 + options_.max_prefetch * kLookahead);
    std::size_t cap = access.slot_cap_bytes;
    for (std::size_t i = now + 1; i < end && access.num_prefetches < options_.max_prefetch; ++i) {
      cap = std::min(cap, plan_.accesses_[i].slot_cap_bytes);
      for (const ChunkId chunk : layout_.chunks_of(plan_.accesses_[i].module)) {
        ChunkState& state = chunks_[index(chunk)];
        if (!moves(chunk) || state.resident) {
          continue;
        }
        if (access.num_prefetches == options_.max_prefetch ||
            !can_make_room(capacity(chunk), cap, now, i + 1)) {
          return;
        }
        make_room(capacity(chunk), cap, now, i + 1);
        state.next_use = i;
        fetch(chunk);
        note_peak(nonmodel_at_entry(now));
        evictable_put(chunk);
        plan_.prefetches_.push_back({chunk, i, cap});
        ++access.num_prefetches;
        ++plan_.prediction_.prefetches;
      }
    }
  }

  // Evicts nothing: a prefetch that does not fit costs nobody their place.
  [[nodiscard]] bool can_make_room(std::size_t bytes, std::size_t cap, std::size_t now,
                                   std::uint64_t horizon) {
    std::vector<ChunkId> victims;
    std::size_t left = slot_bytes_;
    while (left + bytes > cap) {
      const auto victim = evictable_.victim_from(now, horizon);
      if (!victim) {
        break;
      }
      evictable_.remove(*victim);
      victims.push_back(*victim);
      left -= capacity(*victim);
    }
    for (const ChunkId victim : victims) {
      evictable_put(victim);
    }
    return left + bytes <= cap;
  }

  void make_room(std::size_t bytes, std::size_t cap, std::size_t now, std::uint64_t horizon) {
    while (slot_bytes_ + bytes > cap) {
      const auto victim = evictable_.victim_from(now, horizon);
      if (!victim) {
        return;
      }
      evictable_.remove(*victim);
      chunks_[index(*victim)].resident = false;
      slot_bytes_ -= capacity(*victim);
      ++plan_.prediction_.evictions;
    }
  }

  void fetch(ChunkId chunk) {
    chunks_[index(chunk)].resident = true;
    slot_bytes_ += capacity(chunk);
    plan_.prediction_.h2d_bytes += layout_.chunk(chunk).used_bytes;
  }

  void evictable_put(ChunkId chunk) {
    if (placements_[index(chunk)] == Placement::kStream) {
      evictable_.put(chunk, chunks_[index(chunk)].next_use);
    }
  }

  void pin(ChunkId chunk, std::vector<ChunkId>* pins) {
    ChunkState& state = chunks_[index(chunk)];
    if (state.pins++ == 0 && !state.kept) {
      evictable_.remove(chunk);
      pinned_bytes_ += capacity(chunk);
      state.kept = placements_[index(chunk)] == Placement::kKeep;
    }
    pins->push_back(chunk);
  }

  void unpin_from(std::vector<ChunkId>* pins, std::size_t first) {
    while (pins->size() > first) {
      const ChunkId chunk = pins->back();
      pins->pop_back();
      const ChunkState& state = chunks_[index(chunk)];
      if (--chunks_[index(chunk)].pins == 0 && !state.kept) {
        pinned_bytes_ -= capacity(chunk);
        evictable_put(chunk);
      }
    }
  }

  void leave_backward() { unpin_from(&backward_, 0); }

  void exit(ModuleId module) {
    if (std::find(frames_.begin(), frames_.end(), module) == frames_.end()) {
      return;
    }
    while (!frames_.empty()) {
      const ModuleId top = frames_.back();
      frames_.pop_back();
      std::size_t count = 0;
      for (const ChunkId chunk : layout_.chunks_of(top)) {
        count += moves(chunk) ? 1 : 0;
      }
      unpin_from(&stack_, stack_.size() - count);
      if (top == module) {
        return;
      }
    }
  }

  // A prefetch looks this many accesses ahead per chunk: most accesses hit a chunk that is there.
  static constexpr std::size_t kLookahead = 8;

  const Trace& trace_;
  const ChunkLayout& layout_;
  const std::span<const Placement> placements_;
  const PlanOptions& options_;
  Plan plan_;
  std::vector<std::size_t> nonmodel_;  // per access
  std::vector<ChunkState> chunks_;
  EvictionOrder evictable_;
  std::vector<ChunkId> stack_;
  std::vector<ModuleId> frames_;
  std::vector<ChunkId> backward_;
  std::size_t slot_bytes_ = 0;
  std::size_t pinned_bytes_ = 0;  // of chunks that cannot leave: pinned or kept
};

Plan make_plan(const Trace& trace, const ChunkLayout& layout, std::span<const Placement> placements,
               const PlanOptions& options) {
  return Planner(trace, layout, placements, options).run();
}

std::vector<ChunkId> upcoming_chunks(const Plan& plan, const ChunkLayout& layout, std::size_t first,
                                     std::size_t most, const std::function<bool(ChunkId)>& wanted) {
  constexpr std::size_t kAccesses = 64;
  std::vector<ChunkId> chunks;
  const auto& accesses = plan.accesses();
  const std::size_t end = std::min(first + kAccesses, accesses.size());
  for (std::size_t i = first; i < end; ++i) {
    for (const ChunkId chunk : layout.chunks_of(accesses[i].module)) {
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
