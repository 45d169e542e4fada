#pragma once

#include <cstddef>
#include <cstdint>

#include "core/chunk_layout.h"

namespace castor {

/// Run of elements of one parameter, counted from its first element. Results that depend on an
/// element's place (random rounding, blocks of moments) thus do not depend on how parameters are
/// sharded.
struct Piece {
  std::uint64_t first_element = 0;
  std::size_t numel = 0;
};

/// Map of the shards that each rank updates and keeps the optimizer's states of. Every chunk is cut
/// into as many equal shards as there are ranks, in rank order (ZeRO, Rajbhandari et al. 2020,
/// section 5.1, over chunks). Elements that an update takes together are never cut apart: chunks
/// and their shards are multiples of the layout's param_alignment. Immutable.
class ShardMap {
 public:
  /// Makes the map for `rank`: this process, of the layout's world_size. The layout outlives this.
  explicit ShardMap(const ChunkLayout& layout, std::size_t rank = 0)
      : layout_(layout), rank_(rank) {}

  [[nodiscard]] std::size_t ranks() const noexcept { return layout_.world_size(); }
  /// Returns the number of elements of a rank's shard of the chunk.
  [[nodiscard]] std::size_t numel(ChunkId chunk) const {
    const ChunkSpec& spec = layout_.chunk(chunk);
    return spec.used_bytes / size_of(spec.type) / ranks();
  }
  /// Returns the start of this rank's shard, in elements from the start of the chunk.
  [[nodiscard]] std::size_t first(ChunkId chunk) const { return rank_ * numel(chunk); }
  /// Returns this rank's piece of the parameter; it has no elements where other ranks have all.
  [[nodiscard]] Piece piece(ParamId param) const { return piece(param, rank_); }
  [[nodiscard]] Piece piece(ParamId param, std::size_t rank) const;

 private:
  const ChunkLayout& layout_;
  const std::size_t rank_;
};

}  // namespace castor
