#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/executor.h"
#include "core/memory_tier.h"
#include "core/placement.h"
#include "dist/weight_parts.h"
#include "io/chunk_stream.h"
#include "torch/session_options.h"

namespace castor {

/// The homes of weights of a session of which each rank keeps its part of every chunk, and the
/// window through which it sees whole ones. None where nobody asked for it, or where ranks keep
/// whole homes together (RankHomes). Weights that live on the device for good are whole there.
/// Owned by the session.
class CutHomes {
 public:
  /// Of the window: as many chunks are in host memory beside the parts.
  static constexpr std::size_t kSlots = 4;
  /// As HomeStore::max_held: a slot is left for an operator, and one for the other operand of its.
  static constexpr std::size_t kMaxHeld = kSlots - 2;

  /// None.
  CutHomes() = default;
  /// Every rank makes one. Both outlive this. Throws OutOfMemory; UsageError, on every rank, where
  /// no weights have their home on the host, or not the same on all ranks.
  CutHomes(const ChunkLayout& layout, std::span<const Placement> placements,
           const RankGroups& ranks, MemoryTier& host, Executor& executor);

  /// nullptr: weights are whole on every rank, or common.
  [[nodiscard]] WeightParts* parts() const noexcept { return parts_.get(); }
  [[nodiscard]] ChunkStream* stream() const noexcept { return stream_.get(); }
  /// Per chunk.
  [[nodiscard]] const std::vector<bool>& cut() const noexcept { return cut_; }
  /// Of this rank, on the host.
  [[nodiscard]] std::size_t part_bytes() const noexcept { return memory_.bytes(); }
  [[nodiscard]] std::size_t window_bytes() const noexcept { return window_.bytes(); }

 private:
  std::vector<bool> cut_;
  Block memory_;  // of the parts
  Block window_;
  std::unique_ptr<WeightParts> parts_;
  std::unique_ptr<ChunkStream> stream_;  // first to go: reads may be under way
};

}  // namespace castor
