#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/placement.h"
#include "io/nvme_tier.h"
#include "torch/optimizer_state_options.h"

namespace castor {

/// Who pays for the homes of parameters and gradients.
enum class HomesPaid : std::uint8_t {
  kByTheHost,     ///< as they are made
  kByRanks,       ///< RankHomes has paid already for those that it has
  kCut,           ///< CutHomes has
  kGradientsCut,  ///< ... for the gradients', the host pays for the parameters'
};

/// What a session keeps in host memory and on NVMe. Bytes are those of its ledgers.
struct HostPlaces {
  /// Places in `nvme`, and of their streams in the session's NvmeTier.
  static constexpr std::size_t kWeights = 0;      ///< parts as StoredWeights numbers them
  static constexpr std::size_t kStates = 1;       ///< by chunk
  static constexpr std::size_t kActivations = 2;  ///< pages of ActivationPages

  StoredPayloads stored;
  std::vector<NvmeContent> nvme;
  std::uint64_t host_bytes = 0;  ///< windows on NVMe included

  /// Padding of payloads included.
  [[nodiscard]] std::uint64_t nvme_bytes() const;
};

/// Decides what has its place on the host and what on NVMe, before either is taken, for a session
/// with that much host memory left: parameters and gradients first, then optimizer states, and what
/// nvme's budget has left is for activations, where they may go there. Where
/// the session will be refused, host_bytes is what the least windows and everything that cannot
/// leave the host need, which is more than `host_bytes`. Chunks on the device count nowhere.
/// Without `states.nvme` all stays on the host.
[[nodiscard]] HostPlaces choose_host_places(const ChunkLayout& layout,
                                            std::span<const Placement> placements,
                                            const OptimizerStateOptions& states,
                                            std::size_t host_bytes,
                                            HomesPaid homes = HomesPaid::kByTheHost);

}  // namespace castor
