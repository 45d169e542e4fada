#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "cuda/adam_batch.h"
#include "cuda/adam_body.h"
#include "cuda/norm_body.h"
#include "optim/dispatch.h"

namespace castor::testing {

// The kernels' grids, walked by one thread of the host in the bodies that the GPU runs. Flushing
// subnormals stands for nvcc's -ftz=true, -ffp-contract=off for its -fmad=false.

template <typename Body>
void update_elements_on_host(const cuda::AdamBatch& batch) {
  for (std::uint32_t block = 0; block < batch.num_tiles; ++block) {
    const auto tile = batch.tile(block, cuda::kAdamTile);
    const AdamSegment& segment = batch.segments[tile.segment];
    const std::size_t end = std::min(tile.begin + cuda::kAdamTile, segment.numel);
    for (std::size_t i = tile.begin; i < end; ++i)
      Body::store(segment, i, Body::load(segment, i));
  }
}

template <WeightDecayMode mode>
void update_blocks_on_host(const cuda::AdamBatch& batch) {
  using Body = cuda::BlockBody<mode>;
  for (std::uint32_t block = 0; block < batch.num_tiles; ++block) {
    const auto tile = batch.tile(block, kMomentBlock);
    const AdamSegment& segment = batch.segments[tile.segment];
    const std::size_t count = std::min(kMomentBlock, segment.numel - tile.begin);
    std::array<typename Body::Moments, kMomentBlock> moments;
    typename Body::Magnitudes largest{0, 0};
    for (std::size_t thread = 0; thread < count; ++thread) {
      moments[thread] = Body::update(segment, tile.begin + thread);
      const auto magnitudes = Body::magnitudes(moments[thread]);
      largest.exp_avg = std::max(largest.exp_avg, magnitudes.exp_avg);
      largest.exp_avg_sq = std::max(largest.exp_avg_sq, magnitudes.exp_avg_sq);
    }
    const MomentScales scales = Body::scales_for(largest);
    for (std::size_t thread = 0; thread < count; ++thread)
      Body::encode(segment, tile.begin + thread, moments[thread], scales);
    segment.scales[tile.begin / kMomentBlock] = scales;
  }
}

template <WeightDecayMode mode>
void run_batch(const cuda::AdamBatch& batch) {
  using cuda::Fp32Body;
  using cuda::SplitBody;
  const AdamSegment& first = batch.segments[0];
  switch (first.format) {
    case StateFormat::kFp32: break;
    case StateFormat::kSplit:
      return update_elements_on_host<SplitBody<detail::Fp32Moments, mode>>(batch);
    case StateFormat::kSplitBf16:
      return update_elements_on_host<SplitBody<detail::Bf16Moments, mode>>(batch);
    case StateFormat::kSplitInt8: return update_blocks_on_host<mode>(batch);
  }
  switch (first.type) {
    case ScalarType::kFloat32:
      return update_elements_on_host<Fp32Body<ScalarType::kFloat32, mode>>(batch);
    case ScalarType::kBFloat16:
      return update_elements_on_host<Fp32Body<ScalarType::kBFloat16, mode>>(batch);
    case ScalarType::kFloat16:
      return update_elements_on_host<Fp32Body<ScalarType::kFloat16, mode>>(batch);
    case ScalarType::kUInt8: throw_no_arithmetic(first.type);
  }
}

/// The segments are alike: of one type, format and weight decay.
inline void adam_kernels_on_host(std::span<const AdamSegment> alike) {
  const detail::ScopedFlushToZero flush;
  const bool blocks = !alike.empty() && alike[0].format == StateFormat::kSplitInt8;
  for (const auto& batch : cuda::make_batches(alike, blocks ? kMomentBlock : cuda::kAdamTile)) {
    if (batch.segments[0].coefficients.l2_factor != 0.0f) {
      run_batch<WeightDecayMode::kL2>(batch);
    } else {
      run_batch<WeightDecayMode::kDecoupled>(batch);
    }
  }
}

template <ScalarType type>
double norm_kernels_on_host(const typename ScalarCodec<type>::Storage* data, std::size_t numel) {
  const detail::ScopedFlushToZero flush;
  double total = 0.0;
  for (std::size_t begin = 0; begin < numel; begin += kNormBlock) {
    const std::size_t count = std::min(kNormBlock, numel - begin);
    std::array<double, kNormLanes> lanes;
    for (std::size_t lane = 0; lane < kNormLanes; ++lane)
      lanes[lane] = cuda::LaneSquares<type>::sum(data + begin, count, lane);
    // As __shfl_down_sync does: every lane reads before any adds; behind the end it reads itself.
    for (std::size_t width = kNormLanes / 2; width > 0; width /= 2) {
      const auto before = lanes;
      for (std::size_t lane = 0; lane < kNormLanes; ++lane)
        lanes[lane] += before[lane + width < kNormLanes ? lane + width : lane];
    }
    total += lanes[0];
  }
  return total;
}

}  // namespace castor::testing
