#pragma once

#include <cstddef>
#include <cstdint>

#include "core/chunk_layout.h"

namespace castor {

/// A run of elements of one parameter, counted from its first: so that what depends on an element's
/// place (random rounding, blocks of moments) does not depend on how parameters are cut.
struct Piece {
  std::uint64_t first_element = 0;
  std::size_t numel = 0;
};

/// Which parts of the parameters each rank updates, and keeps the optimizer's states of: every
/// chunk is cut into as many equal parts as there are ranks, in rank order (ZeRO, Rajbhandari et
/// al. 2020, section 5.1, over chunks). What an update takes together is never cut: chunks and
/// their parts are multiples of the layout's param_alignment. Immutable.
class ShardMap {
 public:
  /// `rank`: this process, of the layout's world_size. The layout outlives this.
  explicit ShardMap(const ChunkLayout& layout, std::size_t rank = 0)
      : layout_(layout), rank_(rank) {}

  [[nodiscard]] std::size_t ranks() const noexcept { return layout_.world_size(); }
  /// Elements of a rank's part of the chunk.
  [[nodiscard]] std::size_t numel(ChunkId chunk) const {
    const ChunkSpec& spec = layout_.chunk(chunk);
    return spec.used_bytes / size_of(spec.type) / ranks();
  }
  /// Where this rank's part begins, in elements from the start of the chunk.
  [[nodiscard]] std::size_t first(ChunkId chunk) const { return rank_ * numel(chunk); }
  /// This rank's piece of the parameter, of no elements where all are others'.
  [[nodiscard]] Piece piece(ParamId param) const { return piece(param, rank_); }
  [[nodiscard]] Piece piece(ParamId param, std::size_t rank) const;

 private:
  const ChunkLayout& layout_;
  const std::size_t rank_;
};

}  // namespace castor
