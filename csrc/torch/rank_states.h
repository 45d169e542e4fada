#pragma once

#include <cstddef>
#include <vector>

#include "core/collectives.h"
#include "core/rank_meeting.h"
#include "core/shard_map.h"
#include "torch/state_places.h"

namespace castor {

/// Brings together what each rank keeps a piece of: a parameter's optimizer states. Owned by the
/// session; used by the thread that runs forward, backward and step.
class RankStates {
 public:
  /// All outlive this.
  RankStates(Collectives& ranks, RankMeeting& meeting, const ChunkLayout& layout,
             const ShardMap& shards, const StatePlaces& places)
      : ranks_(ranks), meeting_(meeting), layout_(layout), shards_(shards), places_(places) {}

  /// All of a parameter's state, as one process would have it. Every rank calls it, for the same
  /// one, or serves. Throws as RankMeeting::meet_to_read, and what StatePlaces does.
  [[nodiscard]] std::vector<std::byte> read(ParamId param, PayloadKind kind);
  /// Gives its pieces of what other ranks read, until one of them ends that.
  void serve();
  void end_service() { meeting_.end_service(); }

 private:
  /// `whole`: nullptr where nobody here wants it.
  void gather(const StateRequest& request, std::byte* whole);

  Collectives& ranks_;
  RankMeeting& meeting_;
  const ChunkLayout& layout_;
  const ShardMap& shards_;
  const StatePlaces& places_;
};

}  // namespace castor
