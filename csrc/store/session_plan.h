#pragma once

#include <cstddef>
#include <vector>

#include "core/chunk_layout.h"
#include "core/placement.h"
#include "store/session_options.h"

namespace castor {

/// Numbers of what a caller gives for each parameter of a model, which have to be the same.
struct ParamCounts {
  std::size_t params = 0;
  std::size_t names = 0;
  std::size_t trained = 0;
  std::size_t types = 0;
};
/// Throws InvalidArgument where the numbers differ.
void check_counts(const ParamCounts& counts);

/// Layout of a session's chunks and their placements, before any memory is taken.
struct SessionPlan {
  ChunkLayout layout;
  std::vector<Placement> placements;
  SessionOptions options;  ///< the given ones, with what is decided here
};

/// Plans a session. `params`: name, elements and type of each parameter, in execution order.
/// `trained[i]`: whether parameter i gets updates. The layout gets the alignment that the state
/// format needs. Idle models of the same budgets give way. Ranks that reduce on their devices take
/// the communicators' memory from the budget, or do without where all that they need is too much
/// (RankGroups::most_reduction_bytes): a collective call. Throws InvalidArgument where the options
/// do not fit the parameters, or the device has no kernels for the update rule; OutOfMemory.
[[nodiscard]] SessionPlan plan_session(std::vector<ParamSpec> params,
                                       const std::vector<bool>& trained,
                                       std::vector<ModuleSpec> modules,
                                       const SessionOptions& options);

}  // namespace castor
