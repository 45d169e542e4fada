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

class RankHomes;

/// The homes of gradients of a session of which each rank keeps its part of every chunk (ZeRO-2),
/// and those of weights (ZeRO-3), with the window through which it sees whole ones. None where
/// nobody asked for it, or where ranks keep whole homes together (RankHomes). What lives on the
/// device for good is whole there. Owned by the session.
class CutHomes {
 public:
  /// Of the window: as many chunks are in host memory beside the parts.
  static constexpr std::size_t kSlots = 4;
  /// As HomeStore::max_held: a slot is left for an operator, and one for the other operand of its.
  static constexpr std::size_t kMaxHeld = kSlots - 2;

  /// What is left of the host for whole chunks of gradients, of which a rank has a few at once.
  static constexpr std::size_t kGradientCopies = 6;

  /// None.
  CutHomes() = default;
  /// Every rank makes one. `stage`: 2, or 3. `copies`: of the weights (WeightParts). The tier and
  /// the executor outlive this. Throws OutOfMemory; UsageError, on every rank, where nothing has
  /// its home on the host, or not the same on all ranks.
  CutHomes(const ChunkLayout& layout, std::span<const Placement> placements,
           const RankGroups& ranks, std::size_t stage, std::size_t copies, MemoryTier& host,
           Executor& executor);

  /// 2, or 3; 0: there are none.
  [[nodiscard]] std::size_t stage() const noexcept { return stage_; }
  /// Of weights, those of stage 2 empty, and of gradients. nullptr: there are none.
  [[nodiscard]] WeightParts* parts() const noexcept { return parts_.get(); }
  /// Of weights. nullptr: they are whole on every rank, or common.
  [[nodiscard]] ChunkStream* stream() const noexcept { return stream_.get(); }
  /// Of weights, per chunk.
  [[nodiscard]] const std::vector<bool>& cut() const noexcept { return cut_; }
  /// Of weights, that this rank keeps on the host.
  [[nodiscard]] std::size_t part_bytes() const noexcept { return part_bytes_; }
  [[nodiscard]] std::size_t window_bytes() const noexcept { return window_.bytes(); }
  /// That nothing else on the host may take for good.
  [[nodiscard]] std::size_t room_for_copies() const noexcept { return room_for_copies_; }

 private:
  void check_alike(const RankGroups& ranks, const std::vector<bool>& on_host) const;
  void make_window(const ChunkLayout& layout, MemoryTier& host, Executor& executor);

  std::size_t stage_ = 0;
  std::vector<bool> cut_;
  std::size_t part_bytes_ = 0;
  std::size_t room_for_copies_ = 0;
  Block memory_;  // of the parts
  Block window_;
  std::unique_ptr<WeightParts> parts_;
  std::unique_ptr<ChunkStream> stream_;  // first to go: reads may be under way
};

/// A session's: none where ranks keep them together (`common`), or it is alone. Throws as CutHomes;
/// UsageError, on every rank, where they are not kept by the stage that was asked for, or in as
/// many copies.
[[nodiscard]] CutHomes make_cut_homes(const ChunkLayout& layout,
                                      std::span<const Placement> placements,
                                      const SessionOptions& options, const RankHomes& common,
                                      MemoryTier& host, Executor& executor);

}  // namespace castor
