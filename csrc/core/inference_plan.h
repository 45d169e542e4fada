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

/// Device memory that chunks may take in a round of inference.
struct InferenceRoom {
  std::size_t cap_bytes = 0;
  /// Number of chunks that may be fetched ahead of their use.
  std::size_t max_prefetch = 1;
  /// Placement policy; kCpu: no chunk stays between uses.
  PlacementPolicy policy = PlacementPolicy::kAuto;
};

/// Plan of inference, learned from the accesses of its last *round*: a forward pass or a decode
/// step. A round ends when an outermost module is entered that has begun a pass in it before: the
/// next round begins. The plan says which chunks stay on the device all the time, and which stream
/// through the room that these leave. A round that enters other modules is not followed any
/// further; its own accesses are the plan of the next one.
///
/// Accesses are numbered on across rounds, so that the end of a round can look into the next one.
/// An account only, as Residency is: the plan moves nothing. Owned by the runtime, whose mutex
/// guards it.
class InferencePlan {
 public:
  /// Makes an empty plan, which follows nothing. `layout` outlives the plan.
  explicit InferencePlan(const ChunkLayout& layout);

  /// Begins a pass, before the outermost module is entered and before enter() for it. Returns
  /// whether a round begins whose accesses are known; make_room_for() has to follow then.
  [[nodiscard]] bool begin_pass(ModuleId module);
  /// Notes that a module is entered. Returns whether the plan stops being followed with it.
  bool enter(ModuleId module);
  /// Returns whether all accesses of the round so far are the plan's.
  [[nodiscard]] bool followed() const noexcept { return followed_; }

  /// Notes that non-model bytes reached `bytes` in this round.
  void note_nonmodel(std::size_t bytes) noexcept;
  /// Returns the highest non-model bytes of the previous round and this one.
  [[nodiscard]] std::size_t nonmodel_peak() const noexcept;

  /// Chooses anew which chunks stay, if those that stay need more room than there is, or if there
  /// is room for another one. Returns whether it chose; chunks may have other ranks then.
  [[nodiscard]] bool make_room_for(const Residency& residency, const InferenceRoom& room);
  /// Returns the bytes that slots may take.
  [[nodiscard]] std::size_t cap_bytes() const noexcept { return cap_bytes_; }
  [[nodiscard]] bool stays(ChunkId chunk) const { return stays_[index(chunk)]; }

  /// Returns the rank of the i-th chunk of the module entered last. Requires followed(). The chunk
  /// with the highest rank leaves the device first. Chunks that stream leave before those that
  /// stay, and within either group the one that is used last goes first. A chunk that is fetched
  /// ahead, or used again before max_prefetch other streamed chunks, has its next use as its rank,
  /// and leaves last.
  [[nodiscard]] std::uint64_t rank(std::size_t i) const;
  /// Returns the rank of every chunk before the next access. `fetched_ahead` marks chunks that were
  /// fetched ahead and not used yet.
  [[nodiscard]] std::vector<std::uint64_t> ranks(const std::vector<bool>& fetched_ahead) const;
  /// Returns the lowest rank that may leave for a chunk that is used at access `used_at`. Such
  /// ranks are those of chunks that stream and are used after that access.
  [[nodiscard]] static std::uint64_t horizon(std::uint64_t used_at) {
    return kStreams + used_at + 1;
  }

  /// Calls `visit(chunk, access)` for the chunks of the coming accesses, up to one round of them,
  /// until it returns false. Begins at the access where the previous call ended.
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
  /// Makes the next look_ahead begin with the next access, after chunks have left.
  void look_again() noexcept { looked_ = 0; }
  /// Returns the module of a coming access; `ahead` counts from 0. Requires followed().
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
  std::vector<std::vector<ChunkId>> pinned_;  // per module: its chunks and its parents'

  // The modules that this round has entered, and the starts of its passes.
  std::vector<ModuleId> recorded_;
  std::vector<PassStart> passes_;
  std::size_t recorded_peak_ = 0;

  // The plan.
  std::vector<ModuleId> round_;
  std::vector<std::size_t> first_next_use_;  // per access
  std::vector<std::uint64_t> next_uses_;     // counted from the round's first access
  std::vector<bool> soon_;                   // parallel: before max_prefetch other streamed chunks
  std::size_t planned_peak_ = 0;
  std::vector<bool> stays_;  // per chunk; true of chunks resident on the device for good
  std::size_t max_prefetch_ = 0;
  std::size_t chosen_for_bytes_ = 0;
  std::size_t needed_bytes_ = 0;       // for the chunks that stay, and to stream the others
  std::size_t smallest_streamed_ = 0;  // bytes that one more chunk needs to stay
  bool chosen_ = false;
  std::size_t cap_bytes_ = 0;

  // The position of the current round in the plan.
  std::uint64_t first_access_ = 0;
  std::size_t num_entered_ = 0;
  std::uint64_t looked_ = 0;
  bool followed_ = false;
};

}  // namespace castor
