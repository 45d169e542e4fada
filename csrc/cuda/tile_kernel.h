#pragma once

// Internal to csrc/cuda, for nvcc only.

#include <cstddef>

#include "cuda/segment_batch.h"

namespace castor::cuda {

/// Updates the elements of a batch in tiles of kTileElements, one a thread block. A `Body` says how
/// an element of its Segment is loaded and stored (adam_body.h, element_body.h).
template <typename Body>
__global__ __launch_bounds__(kTileThreads) void update_elements(
    const __grid_constant__ SegmentBatch<typename Body::Segment> batch) {
  const auto tile = batch.tile(blockIdx.x, kTileElements);
  const typename Body::Segment& segment = batch.segments[tile.segment];
  typename Body::Loaded loaded[kTileUnroll];
  // Neighbouring threads have neighbouring elements: whole lines for every array, whatever its
  // element's size and alignment.
#pragma unroll
  for (unsigned u = 0; u < kTileUnroll; ++u) {
    const std::size_t i = tile.begin + u * kTileThreads + threadIdx.x;
    if (i < segment.numel)
      loaded[u] = Body::load(segment, i);
  }
#pragma unroll
  for (unsigned u = 0; u < kTileUnroll; ++u) {
    const std::size_t i = tile.begin + u * kTileThreads + threadIdx.x;
    if (i < segment.numel)
      Body::store(segment, i, loaded[u]);
  }
}

}  // namespace castor::cuda
