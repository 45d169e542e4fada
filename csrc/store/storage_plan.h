#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/placement.h"
#include "io/nvme_tier.h"
#include "store/optimizer_state_options.h"

namespace castor {

/// Payer of the host storage of parameters and gradients.
enum class HostStoragePayer : std::uint8_t {
  kHostBudget,        ///< the host's budget, as they are made
  kRankHostStorage,   ///< RankHostStorage, which has paid already for those that it has
  kSharded,           ///< ShardedHostStorage, which has paid already
  kShardedGradients,  ///< ShardedHostStorage for the gradients, the host's budget for the
                      ///< parameters
};

/// Storage plan of a session: its contents of host memory and of NVMe. Bytes are those of the
/// session's ledgers.
struct StoragePlan {
  /// Positions in `nvme`, and of the streams in the session's NvmeTier.
  static constexpr std::size_t kWeights = 0;      ///< numbered by part, as StoredWeights::parts_of
  static constexpr std::size_t kStates = 1;       ///< numbered by chunk
  static constexpr std::size_t kActivations = 2;  ///< pages of ActivationPages

  StoredPayloads stored;
  std::vector<NvmeContent> nvme;
  std::uint64_t host_bytes = 0;  ///< bytes of host memory, with the windows on NVMe

  /// Returns the bytes on NVMe, with the padding of payloads.
  [[nodiscard]] std::uint64_t nvme_bytes() const;
};

/// Decides what goes to the host and what to NVMe, before either is taken, for a session with
/// `host_bytes` of host memory left. Parameters and gradients get room first, then optimizer
/// states. Activations get what the budget of NVMe has left, if they may go there. Chunks on the
/// device count nowhere. Without `states.nvme` all stays on the host.
///
/// If the session will be refused, host_bytes of the result exceeds the argument: it is the need of
/// the smallest windows and of everything that cannot leave the host.
[[nodiscard]] StoragePlan plan_storage(const ChunkLayout& layout,
                                       std::span<const Placement> placements,
                                       const OptimizerStateOptions& states, std::size_t host_bytes,
                                       HostStoragePayer payer = HostStoragePayer::kHostBudget);

}  // namespace castor
