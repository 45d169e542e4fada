#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/mutex.h"
#include "core/placement.h"
#include "core/residency.h"

namespace castor {

/// What chunks may take of the device in a round of inference.
struct InferenceRoom {
  std::size_t cap_bytes = 0;
  /// How many chunks may be fetched ahead of their use.
  std::size_t max_prefetch = 1;
  /// kCpu: none stays between uses.
  PlacementPolicy policy = PlacementPolicy::kAuto;
};

/// What inference does again and again, learned from what it did last: the accesses of a *round*,
/// which ends when an outermost module is entered that began a pass of it before (the next forward,
/// the next decoding step); which chunks stay on the device all the time, and which stream through
/// the room that these leave. A round that enters other modules is not followed any further; its
/// own accesses are the plan of the next one.
///
/// Accesses are numbered on and on, so that the end of a round can look into the next one. An
/// account only, as Residency: it moves nothing. Owned by the runtime, whose mutex guards it.
class InferencePlan {
 public:
  /// `layout` outlives it.
  explicit InferencePlan(const ChunkLayout& layout);

  /// Before an outermost module is entered, and enter() for it. Returns whether a round begins
  /// whose accesses are known: make_room_for() then.
  [[nodiscard]] bool begin_pass(ModuleId module);
  /// A module is entered. Returns whether that ends a round's being followed.
  bool enter(ModuleId module);
  /// Whether all accesses of the round so far are the plan's.
  [[nodiscard]] bool followed() const noexcept { return followed_; }

  /// Non-model bytes were that high in the round.
  void note_nonmodel(std::size_t bytes) noexcept;
  /// In the round before, or in this one.
  [[nodiscard]] std::size_t nonmodel_peak() const noexcept;

  /// Chooses anew which chunks stay, where those that do need more room, or another one would find
  /// it. Returns whether it chose: their ranks may be others then.
  [[nodiscard]] bool make_room_for(const Residency& residency, const InferenceRoom& room);
  /// Slots may take this much.
  [[nodiscard]] std::size_t cap_bytes() const noexcept { return cap_bytes_; }
  [[nodiscard]] bool stays(ChunkId chunk) const { return stays_[index(chunk)]; }

  /// Of the i-th chunk of the module entered last. Requires followed(). Those that stream leave
  /// before those that stay, and among either the one goes first that is used last. What is fetched
  /// ahead, or used again before max_prefetch others that stream, has its next use as its rank, and
  /// leaves last.
  [[nodiscard]] std::uint64_t rank(std::size_t i) const;
  /// The same of all chunks, before the next access. `fetched_ahead`: not used yet.
  [[nodiscard]] std::vector<std::uint64_t> ranks(const std::vector<bool>& fetched_ahead) const;
  /// Ranks from there on may leave for a chunk that is used at that access: those of chunks that
  /// stream and are used after it.
  [[nodiscard]] static std::uint64_t horizon(std::uint64_t used_at) {
    return kStreams + used_at + 1;
  }

  /// Calls `visit(chunk, access)` for the chunks of the accesses to come, a round of them, until it
  /// returns false; begins where that was the last time.
  template <typename Visit>
  void look_ahead(Visit&& visit) CASTOR_NOT_ANALYZED {
    const std::uint64_t next = first_access_ + num_entered_;
    for (looked_ = std::max(looked_, next); looked_ < next + round_.size(); ++looked_) {
      for (const ChunkId chunk : layout_.chunks_of(module_at(looked_))) {
        if (!visit(chunk, looked_)) {
          return;
        }
      }
    }
  }
  /// The next look begins with the next access: chunks have left.
  void look_again() noexcept { looked_ = 0; }
  /// Module of an access to come; `ahead` counts from 0. Requires followed().
  [[nodiscard]] ModuleId upcoming(std::size_t ahead) const {
    return module_at(first_access_ + num_entered_ + ahead);
  }

 private:
  static constexpr std::uint64_t kStays = std::uint64_t{1} << 61;
  static constexpr std::uint64_t kStreams = std::uint64_t{1} << 62;

  struct PassStart {
    ModuleId module;
    std::size_t first_access;
  };

  [[nodiscard]] ModuleId module_at(std::uint64_t access) const {
    return round_[(access - first_access_) % round_.size()];
  }
  void adopt(std::span<const ModuleId> round);
  void find_next_uses();
  void choose(const Residency& residency, const InferenceRoom& room);
  [[nodiscard]] std::vector<ChunkId> by_preference(const Residency& residency) const;
  [[nodiscard]] std::uint64_t ranked(ChunkId chunk, std::uint64_t next_use, bool soon) const {
    return next_use == kNeverUsed || soon ? next_use
                                          : (stays(chunk) ? kStays : kStreams) + next_use;
  }
  std::size_t measure_window(const Residency& residency);

  const ChunkLayout& layout_;
  std::vector<std::vector<ChunkId>> pinned_;  // per module: its chunks and those around it

  // What this round has entered, and where its passes began.
  std::vector<ModuleId> recorded_;
  std::vector<PassStart> passes_;
  std::size_t recorded_peak_ = 0;

  // The plan.
  std::vector<ModuleId> round_;
  std::vector<std::size_t> first_next_use_;  // per access
  std::vector<std::uint64_t> next_uses_;     // counted from the round's first access
  std::vector<bool> soon_;                   // parallel: before max_prefetch others that stream
  std::size_t planned_peak_ = 0;
  std::vector<bool> stays_;  // per chunk; those that live on the device do
  std::size_t max_prefetch_ = 0;
  std::size_t chosen_for_bytes_ = 0;
  std::size_t needed_bytes_ = 0;       // by those that stay, and to stream the others
  std::size_t smallest_streamed_ = 0;  // room for one more that would stay
  bool chosen_ = false;
  std::size_t cap_bytes_ = 0;

  // Where in it the round under way is.
  std::uint64_t first_access_ = 0;
  std::size_t num_entered_ = 0;
  std::uint64_t looked_ = 0;
  bool followed_ = false;
};

}  // namespace castor
