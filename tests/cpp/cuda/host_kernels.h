#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string_view>

#include "cuda/adam_body.h"
#include "cuda/element_body.h"
#include "cuda/norm_body.h"
#include "cuda/segment_batch.h"
#include "optim/adam_rule.h"
#include "optim/dispatch.h"
#include "optim/element_check.h"
#include "optim/lion_element.h"
#include "optim/lion_rule.h"
#include "optim/sgd_element.h"
#include "optim/sgd_rule.h"

namespace castor::testing {

// The kernels' grids, walked by one thread of the host in the bodies that the GPU runs. Flushing
// subnormals stands for nvcc's -ftz=true, -ffp-contract=off for its -fmad=false.

using AdamBatch = cuda::SegmentBatch<AdamSegment>;

template <typename Body>
void update_elements_on_host(const cuda::SegmentBatch<typename Body::Segment>& batch) {
  for (std::uint32_t block = 0; block < batch.num_tiles; ++block) {
    const auto tile = batch.tile(block, cuda::kTileElements);
    const typename Body::Segment& segment = batch.segments[tile.segment];
    const std::size_t end = std::min(tile.begin + cuda::kTileElements, segment.numel);
    for (std::size_t i = tile.begin; i < end; ++i)
      Body::store(segment, i, Body::load(segment, i));
  }
}

template <WeightDecayMode mode>
void update_blocks_on_host(const AdamBatch& batch) {
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
void run_batch(const AdamBatch& batch) {
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
  const std::size_t tile_elements = blocks ? kMomentBlock : cuda::kTileElements;
  for (const AdamBatch& batch : cuda::make_batches(alike, tile_elements)) {
    if (batch.segments[0].coefficients.l2_factor != 0.0f) {
      run_batch<WeightDecayMode::kL2>(batch);
    } else {
      run_batch<WeightDecayMode::kDecoupled>(batch);
    }
  }
}

/// The kernels of a rule whose coefficients are an `Element`.
template <typename Element>
void element_kernels_on_host(bool split, std::span<const UpdateSegment> segments) {
  const detail::ScopedFlushToZero flush;
  cuda::for_each_element_batch<Element>(split, segments, []<typename Body>(const auto& batch) {
    update_elements_on_host<Body>(batch);
  });
}

/// cuda::element_update().
template <typename Element>
void element_update_on_host(const UpdateRule& rule, std::span<const UpdateSegment> segments) {
  detail::check_segments(rule, segments);
  element_kernels_on_host<Element>(rule.splits_masters(), segments);
}

struct KernelsOnHost {
  std::string_view rule;
  void (*update)(const UpdateRule&, std::span<const UpdateSegment>);
};

/// As in update_kernels.cc.
inline constexpr KernelsOnHost kKernelsOnHost[] = {
    {AdamRule::kName,
     [](const UpdateRule& rule, std::span<const UpdateSegment> segments) {
       for (const AdamSegment& segment : adam_segments(segments, rule.format()))
         adam_kernels_on_host(std::span(&segment, 1));
     }},
    {LionRule::kName, &element_update_on_host<LionElement>},
    {SgdRule<Momentum::kNone>::kName, &element_update_on_host<SgdElement<false>>},
    {SgdRule<Momentum::kBuffer>::kName, &element_update_on_host<SgdElement<true>>},
};

/// The kernels of the rule of that name; nullptr: there are none.
[[nodiscard]] inline const KernelsOnHost* kernels_on_host(std::string_view rule) noexcept {
  const auto* const found = std::ranges::find(kKernelsOnHost, rule, &KernelsOnHost::rule);
  return found == std::end(kKernelsOnHost) ? nullptr : found;
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
