#include "cuda/norm_kernel.h"

#include <string>

#include "core/error.h"
#include "cuda/launch.h"
#include "cuda/norm_body.h"

namespace castor::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr std::size_t kBlocksPerThreadBlock = kThreads / kNormLanes;

std::size_t num_blocks_of(const NormSegment& segment) {
  return (segment.numel + kNormBlock - 1) / kNormBlock;
}

/// kNormLanes threads add a block of elements; sums[b] is that of block b.
template <ScalarType type>
__global__ __launch_bounds__(kThreads) void add_lanes(const void* data, std::size_t numel,
                                                      double* sums) {
  using Storage = typename LaneSquares<type>::Storage;
  const std::size_t block =
      std::size_t{blockIdx.x} * kBlocksPerThreadBlock + threadIdx.x / kNormLanes;
  const std::size_t lane = threadIdx.x % kNormLanes;
  const std::size_t begin = block * kNormBlock;
  // Behind the end the count is 0, and no thread leaves: all take part in the shuffles.
  const std::size_t left = begin < numel ? numel - begin : 0;
  const std::size_t count = left < kNormBlock ? left : kNormBlock;
  double sum = LaneSquares<type>::sum(static_cast<const Storage*>(data) + begin, count, lane);
#pragma unroll
  for (unsigned width = kNormLanes / 2; width > 0; width /= 2)
    sum += __shfl_down_sync(0xffffffffu, sum, width, kNormLanes);
  if (lane == 0 && count > 0)
    sums[block] = sum;
}

/// Adds the blocks from first to last. One thread does the additions: their order is the result.
__global__ __launch_bounds__(kThreads) void add_blocks(const double* sums, std::size_t num_blocks,
                                                       double* total) {
  __shared__ double staged[kThreads];
  double sum = 0.0;
  for (std::size_t begin = 0; begin < num_blocks; begin += kThreads) {
    const std::size_t left = num_blocks - begin;
    const unsigned count = left < kThreads ? static_cast<unsigned>(left) : kThreads;
    if (threadIdx.x < count)
      staged[threadIdx.x] = sums[begin + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
      for (unsigned i = 0; i < count; ++i)
        sum += staged[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0)
    *total = sum;
}

using AddLanes = void (*)(const void*, std::size_t, double*);

AddLanes add_lanes_of(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat32: return &add_lanes<ScalarType::kFloat32>;
    case ScalarType::kBFloat16: return &add_lanes<ScalarType::kBFloat16>;
    case ScalarType::kFloat16: return &add_lanes<ScalarType::kFloat16>;
    case ScalarType::kUInt8: throw_no_arithmetic(type);
  }
  throw InvalidArgument("square_norms: unknown scalar type " +
                        std::to_string(static_cast<int>(type)));
}

}  // namespace

std::size_t norm_workspace_doubles(std::span<const NormSegment> segments) noexcept {
  std::size_t count = 0;
  for (const NormSegment& segment : segments)
    count += num_blocks_of(segment);
  return count;
}

void square_norms(std::span<const NormSegment> segments, double* sums, double* workspace,
                  cudaStream_t stream) {
  for (const NormSegment& segment : segments) {
    if (segment.numel > 0 && segment.data == nullptr) {
      throw InvalidArgument("square_norms: a segment of " + std::to_string(segment.numel) + " " +
                            std::string(to_string(segment.type)) + " elements has no data");
    }
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const NormSegment& segment = segments[i];
    const std::size_t num_blocks = num_blocks_of(segment);
    if (num_blocks > 0) {
      const std::size_t grid = (num_blocks + kBlocksPerThreadBlock - 1) / kBlocksPerThreadBlock;
      launch("the square norm kernel", add_lanes_of(segment.type), static_cast<unsigned>(grid),
             kThreads, stream, segment.data, segment.numel, workspace);
    }
    launch("the square norm kernel", &add_blocks, 1u, kThreads, stream,
           static_cast<const double*>(workspace), num_blocks, sums + i);
    workspace += num_blocks;
  }
}

}  // namespace castor::cuda
