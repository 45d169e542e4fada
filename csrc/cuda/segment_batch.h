#pragma once

// Internal to csrc/cuda: tells which elements of which segment a thread block works on. Contains
// nothing but plain C++.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "optim/elementwise.h"

namespace castor::cuda {

/// Threads of a block that updates independent elements.
inline constexpr unsigned kTileThreads = 256;
/// Elements whose loads a thread has under way at once.
inline constexpr unsigned kTileUnroll = 4;
/// Elements of a segment that a thread block updates, where the elements are independent.
inline constexpr std::size_t kTileElements = std::size_t{kTileThreads} * kTileUnroll;

/// Bytes of a batch. With a few further arguments they fit the 4 KiB that every device takes as
/// kernel parameters, so that no descriptor is ever copied to the device by itself.
inline constexpr std::size_t kBatchBytes = 4096 - 64;

/// Segments of one launch. They are cut into tiles of equal size (the last is shorter), and thread
/// block b works on tile b. A `Segment` has a `numel`.
template <typename Segment>
struct SegmentBatch {
  static constexpr std::size_t kCapacity =
      (kBatchBytes - 2 * sizeof(std::uint32_t)) / (sizeof(Segment) + sizeof(std::uint32_t));

  Segment segments[kCapacity];
  std::uint32_t first_tile[kCapacity];  ///< number of tiles before segment s
  std::uint32_t num_segments;
  std::uint32_t num_tiles;

  struct Tile {
    std::uint32_t segment;
    std::size_t begin;  ///< first element in the segment
  };

  [[nodiscard]] CASTOR_ELEMENTWISE Tile tile(std::uint32_t block,
                                             std::size_t tile_elements) const noexcept {
    std::uint32_t segment = 0;
    while (segment + 1 < num_segments && first_tile[segment + 1] <= block)
      ++segment;
    return {segment, (block - first_tile[segment]) * tile_elements};
  }
};

/// Returns a batch of no segments, with `filler` in every place: a Segment may have no default.
template <typename Segment, std::size_t... i>
SegmentBatch<Segment> empty_batch(const Segment& filler, std::index_sequence<i...>) {
  return {.segments = {(static_cast<void>(i), filler)...},
          .first_tile = {},
          .num_segments = 0,
          .num_tiles = 0};
}

/// Returns the batches that cover `segments`, in order. Segments of no elements are left out.
/// REQUIRES that no segment has 2^31 tiles or more.
template <typename Segment>
[[nodiscard]] std::vector<SegmentBatch<Segment>> make_batches(std::span<const Segment> segments,
                                                              std::size_t tile_elements) {
  using Batch = SegmentBatch<Segment>;
  static_assert(std::is_trivially_copyable_v<Batch>, "kernel parameters are copied as bytes");
  static_assert(sizeof(Batch) <= kBatchBytes);
  constexpr std::size_t kMaxTiles = std::numeric_limits<std::int32_t>::max();  // of a grid
  std::vector<Batch> batches;
  for (const Segment& segment : segments) {
    const std::size_t num_tiles = (segment.numel + tile_elements - 1) / tile_elements;
    if (num_tiles == 0)
      continue;
    if (batches.empty() || batches.back().num_segments == Batch::kCapacity ||
        num_tiles > kMaxTiles - batches.back().num_tiles) {
      batches.push_back(empty_batch(segment, std::make_index_sequence<Batch::kCapacity>{}));
    }
    Batch& batch = batches.back();
    batch.segments[batch.num_segments] = segment;
    batch.first_tile[batch.num_segments] = batch.num_tiles;
    ++batch.num_segments;
    batch.num_tiles += static_cast<std::uint32_t>(num_tiles);
  }
  return batches;
}

}  // namespace castor::cuda
