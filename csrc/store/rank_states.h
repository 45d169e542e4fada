#pragma once

#include <cstddef>
#include <vector>

#include "core/collectives.h"
#include "core/consistency_check.h"
#include "core/shard_map.h"
#include "store/state_store.h"

namespace castor {

/// Gathers a parameter's optimizer states, of which each rank keeps a shard. Owned by the session;
/// used by the thread that runs forward, backward and step.
class RankStates {
 public:
  /// All arguments outlive this.
  RankStates(Collectives& ranks, ConsistencyCheck& consistency, const ChunkLayout& layout,
             const ShardMap& shards, const StateStore& places)
      : ranks_(ranks),
        consistency_(consistency),
        layout_(layout),
        shards_(shards),
        places_(places) {}

  /// Returns a parameter's full state, as one process would have it. Every rank calls this for the
  /// same parameter and kind, or calls serve(). Throws as ConsistencyCheck::check_read and as
  /// StateStore; a rank that throws leaves the others, which then throw as well.
  [[nodiscard]] std::vector<std::byte> read(ParamId param, PayloadKind kind);
  /// Sends this rank's shards of the states that other ranks read, until one of them ends the
  /// service.
  void serve();
  void end_service() { consistency_.end_service(); }

 private:
  /// `full`: memory for the full state; nullptr on a rank that only serves.
  void gather(const StateRequest& request, std::byte* full);

  Collectives& ranks_;
  ConsistencyCheck& consistency_;
  const ChunkLayout& layout_;
  const ShardMap& shards_;
  const StateStore& places_;
};

}  // namespace castor
