#include "store/rank_host_bytes.h"

#include <algorithm>

#include "host/shared_host_storage.h"
#include "ranks/rank_reduction.h"
#include "store/sharded_host_storage.h"

namespace castor {

RankHostBytes rank_host_bytes(const ChunkLayout& layout, std::span<const Placement> placements,
                              std::size_t ranks, std::size_t sharing, ReducedOn where) {
  RankHostBytes bytes;
  std::size_t largest = 0;
  std::size_t largest_shared = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const ChunkSpec& chunk = layout.chunks()[i];
    largest = std::max(largest, chunk.trainable ? chunk.used_bytes : 0);
    if (sharing > 1 && placements[i] != Placement::kDevice && chunk.updated_in_shards()) {
      const std::size_t pages = SharedHostStorage::size_of(chunk.used_bytes);
      bytes.weights += pages;
      bytes.gradients += chunk.trainable ? pages : 0;
      largest_shared = std::max(largest_shared, chunk.trainable ? pages : 0);
    }
    bytes.weights_until.push_back(bytes.weights);
  }
  bytes.weights_share = (bytes.weights + sharing - 1) / sharing;
  bytes.gradients_share = (bytes.gradients + sharing - 1) / sharing;
  bytes.window =
      RankReduction::window_bytes(largest, ranks, bytes.gradients > 0 ? sharing : 1, where);
  if (bytes.gradients > 0) {
    bytes.room_for_copies = ShardedHostStorage::kGradientCopies * largest_shared +
                            RankReduction::window_bytes(largest_shared, ranks, sharing, where);
  }
  return bytes;
}

}  // namespace castor
