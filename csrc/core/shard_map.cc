#include "core/shard_map.h"

#include <algorithm>

namespace castor {

Piece ShardMap::piece(ParamId param, std::size_t rank) const {
  const ParamPlace place = layout_.place(param);
  const std::size_t shard = numel(place.chunk);
  const std::size_t begin = std::max(place.offset, rank * shard);
  const std::size_t end = std::min(place.offset + layout_.param(param).numel, (rank + 1) * shard);
  return begin < end ? Piece{.first_element = begin - place.offset, .numel = end - begin} : Piece{};
}

}  // namespace castor
