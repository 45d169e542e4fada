#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/chunk_layout.h"
#include "core/placement.h"
#include "core/simulated_nvme.h"
#include "torch/optimizer_state.h"

namespace castor {

/// What a session keeps in host memory and on NVMe. Bytes are those of its ledgers.
struct HostPlaces {
  StoredPayloads stored;
  std::uint64_t host_bytes = 0;         ///< windows on NVMe included
  std::uint64_t nvme_bytes = 0;         ///< padding of payloads included
  std::uint64_t nvme_weight_bytes = 0;  ///< of them parameters and gradients
};

/// Decides as a session does when it is made with that much host memory, in the same order:
/// StoredWeights, then ChunkManager, then OptimizerState. Where it would refuse, host_bytes is what
/// the least windows and everything that cannot leave the host need, which is more than
/// `host_bytes`. Chunks on the device count nowhere. Without `states.nvme` all stays on the host.
[[nodiscard]] HostPlaces choose_host_places(const ChunkLayout& layout,
                                            std::span<const Placement> placements,
                                            const OptimizerStateOptions& states,
                                            std::size_t host_bytes);

}  // namespace castor
