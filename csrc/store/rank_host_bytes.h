#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/device_reduction.h"
#include "core/placement.h"

namespace castor {

/// Bytes of host memory that parameters and gradients of a rank take where ranks share them, for
/// the session and the estimate alike. Optimizer states are not among them.
struct RankHostBytes {
  /// Bytes of a machine's ranks together: where each chunk's weights end, in order of chunks.
  std::vector<std::size_t> weights_until;
  std::size_t weights = 0;
  std::size_t gradients = 0;
  std::size_t weights_share = 0;    ///< this rank's part of the weights
  std::size_t gradients_share = 0;  ///< and of the gradients
  std::size_t window = 0;           ///< window through which gradients pass from rank to rank
  std::size_t room_for_copies = 0;  ///< gradients on their way, the window included
};

/// Returns the bytes for so many ranks, of which `sharing` on each machine share host storage; 1:
/// each has its own, and takes no more than the window.
[[nodiscard]] RankHostBytes rank_host_bytes(const ChunkLayout& layout,
                                            std::span<const Placement> placements,
                                            std::size_t ranks, std::size_t sharing,
                                            ReducedOn where);

}  // namespace castor
