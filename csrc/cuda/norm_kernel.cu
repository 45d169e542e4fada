#include "cuda/norm_kernel.h"

#include <algorithm>

#include "cuda/cuda_error.h"
#include "cuda/launch.h"
#include "cuda/norm_body.h"

namespace castor::cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

/// kNormLanes threads add a block of elements.
__global__ __launch_bounds__(kNormThreads) void add_lanes(const __grid_constant__ NormBatch batch,
                                                          double* sums) {
  const NormBatch::Tile tile = batch.tile(blockIdx.x, kNormTile);
  const std::size_t block = threadIdx.x / kNormLanes;
  const std::size_t lane = threadIdx.x % kNormLanes;
  // No thread leaves behind the segment's end: all take part in the shuffles.
  double sum = lane_squares(batch.segments[tile.segment], tile.begin + block * kNormBlock, lane);
#pragma unroll
  for (unsigned width = kNormLanes / 2; width > 0; width /= 2)
    sum += __shfl_down_sync(kAllLanes, sum, width, kNormLanes);
  if (lane == 0)
    sums[blockIdx.x * kNormBlocksOfTile + block] = sum;
}

__device__ Additions shuffle_up(Additions value, unsigned width) {
  return {__shfl_up_sync(kAllLanes, value.to_even, width),
          __shfl_up_sync(kAllLanes, value.to_odd, width)};
}

/// Returns the additions of this lane and of those before it in its warp.
__device__ Additions scan_warp(Additions own) {
  const unsigned lane = threadIdx.x % kWarp;
#pragma unroll
  for (unsigned width = 1; width < kWarp; width *= 2) {
    const Additions before = shuffle_up(own, width);
    if (lane >= width)
      own = then(before, own);
  }
  return own;
}

/// A thread block adds the sums of one segment's blocks of elements from first to last, with the
/// bits of one addition after the other (ordered_sum.h).
__global__ __launch_bounds__(kOrderedThreads) void add_blocks(
    const __grid_constant__ NormBatch batch, const double* sums, double* totals) {
  constexpr unsigned kWarps = kOrderedThreads / kWarp;
  static_assert(kWarps == kWarp, "one warp scans all of them");
  __shared__ RunningTotal running;
  __shared__ Additions of_warp[kWarps];
  const NumberedSegment& segment = batch.segments[blockIdx.x];
  const double* const of_segment = sums + batch.first_tile[blockIdx.x] * kNormBlocksOfTile;
  const std::size_t num_sums = segment.num_blocks();
  const unsigned warp = threadIdx.x / kWarp;
  const unsigned lane = threadIdx.x % kWarp;

  if (threadIdx.x == 0) {
    const std::size_t count = num_sums < kAddedSingly ? num_sums : kAddedSingly;
    double total = 0.0;
    for (std::size_t i = 0; i < count; ++i)
      total += of_segment[i];
    running = {total, count};
  }
  __syncthreads();
  while (running.begin < num_sums && has_units(running.total)) {
    const Units total = units_of(running.total);
    const OrderedPart part = OrderedPart::load(of_segment, num_sums, running.begin, threadIdx.x);
    const Additions in_warp = scan_warp(part.additions(total.exponent));
    if (lane == kWarp - 1)
      of_warp[warp] = in_warp;
    __syncthreads();  // also: everybody has read `running`
    if (warp == 0)
      of_warp[lane] = scan_warp(of_warp[lane]);
    __syncthreads();
    Additions before = shuffle_up(in_warp, 1);
    if (lane == 0)
      before = {0, 0};
    if (warp > 0)
      before = then(of_warp[warp - 1], before);
    RunningTotal now;
    if (part.ends_round(total, before, threadIdx.x == kOrderedThreads - 1, now))
      running = now;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    double total = running.total;
    for (std::size_t i = running.begin; i < num_sums; ++i)  // of an infinity or NaN
      total += of_segment[i];
    totals[segment.index] = total;
  }
}

}  // namespace

std::size_t norm_workspace_doubles(std::span<const NormSegment> segments) noexcept {
  return workspace_of(segments);
}

void square_norms(std::span<const NormSegment> segments, double* sums, double* workspace,
                  cudaStream_t stream) {
  check_segments(segments);
  const auto is_empty = [](const NormSegment& segment) { return segment.numel == 0; };
  if (std::any_of(segments.begin(), segments.end(), is_empty)) {  // which are in no batch
    check(cudaMemsetAsync(sums, 0, segments.size() * sizeof(double), stream),
          "zeroing the square norms");
  }
  for (const NormBatch& batch : norm_batches(segments)) {
    launch("the square norm kernel", &add_lanes, batch.num_tiles, kNormThreads, stream, batch,
           workspace);
    launch("the square norm kernel", &add_blocks, batch.num_segments, kOrderedThreads, stream,
           batch, static_cast<const double*>(workspace), sums);
    workspace += workspace_of(batch);
  }
}

}  // namespace castor::cuda
