#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "cuda/adam_body.h"
#include "cuda/element_body.h"
#include "cuda/mean_body.h"
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

/// cuda::average().
inline void average_on_host(void* mean, const void* parts, std::size_t count, std::size_t numel,
                            ScalarType type) {
  cuda::for_mean_of(mean, parts, count, numel, type, [](const auto& of) {
    for (std::size_t i = 0; i < of.numel; ++i)
      of.run(i);
  });
}

/// The first stage of the norm kernels.
inline void add_lanes_on_host(const cuda::NormBatch& batch, double* sums) {
  const detail::ScopedFlushToZero flush;
  for (std::uint32_t tile = 0; tile < batch.num_tiles; ++tile) {
    const auto [segment, begin] = batch.tile(tile, cuda::kNormTile);
    for (std::size_t block = 0; block < cuda::kNormBlocksOfTile; ++block) {
      std::array<double, kNormLanes> lanes;
      for (std::size_t lane = 0; lane < kNormLanes; ++lane) {
        lanes[lane] = cuda::lane_squares(batch.segments[segment], begin + block * kNormBlock, lane);
      }
      // As __shfl_down_sync does: every lane reads before any adds; behind the end it reads itself.
      for (std::size_t width = kNormLanes / 2; width > 0; width /= 2) {
        const auto before = lanes;
        for (std::size_t lane = 0; lane < kNormLanes; ++lane)
          lanes[lane] += before[lane + width < kNormLanes ? lane + width : lane];
      }
      sums[tile * cuda::kNormBlocksOfTile + block] = lanes[0];
    }
  }
}

/// Replaces each entry by the composition of those up to it, as a scan of warps does it.
inline void scan_on_host(std::span<cuda::Additions> entries) {
  for (std::size_t width = 1; width < entries.size(); width *= 2) {
    for (std::size_t i = entries.size(); i-- > width;)
      entries[i] = cuda::then(entries[i - width], entries[i]);
  }
}

/// One round of the second stage.
inline cuda::RunningTotal ordered_round_on_host(std::span<const double> sums,
                                                const cuda::RunningTotal& running) {
  constexpr std::size_t kWarp = 32;
  const cuda::Units total = cuda::units_of(running.total);
  std::vector<cuda::OrderedPart> parts;
  std::vector<cuda::Additions> scanned;
  for (unsigned thread = 0; thread < cuda::kOrderedThreads; ++thread) {
    parts.push_back(cuda::OrderedPart::load(sums.data(), sums.size(), running.begin, thread));
    scanned.push_back(parts.back().additions(total.exponent));
  }
  std::vector<cuda::Additions> of_warp;
  for (std::size_t begin = 0; begin < scanned.size(); begin += kWarp) {
    scan_on_host(std::span(scanned).subspan(begin, kWarp));
    of_warp.push_back(scanned[begin + kWarp - 1]);
  }
  scan_on_host(of_warp);
  std::optional<cuda::RunningTotal> result;
  for (std::size_t thread = 0; thread < parts.size(); ++thread) {
    cuda::Additions before{0, 0};
    if (thread % kWarp > 0)
      before = scanned[thread - 1];
    if (thread >= kWarp)
      before = cuda::then(of_warp[thread / kWarp - 1], before);
    cuda::RunningTotal now{};
    if (parts[thread].ends_round(total, before, thread + 1 == parts.size(), now)) {
      if (result)
        throw Error("two threads end a round");
      result = now;
    }
  }
  return result.value();
}

/// What a thread block of the second stage does; counts its rounds.
inline double ordered_sum_on_host(std::span<const double> sums, std::size_t* num_rounds = nullptr) {
  cuda::RunningTotal running{0.0, std::min(sums.size(), cuda::kAddedSingly)};
  for (std::size_t i = 0; i < running.begin; ++i)
    running.total += sums[i];
  while (running.begin < sums.size() && cuda::has_units(running.total)) {
    running = ordered_round_on_host(sums, running);
    if (num_rounds != nullptr)
      ++*num_rounds;
  }
  for (std::size_t i = running.begin; i < sums.size(); ++i)
    running.total += sums[i];
  return running.total;
}

/// The second stage of the norm kernels.
inline void add_blocks_on_host(const cuda::NormBatch& batch, const double* sums, double* totals) {
  for (std::uint32_t i = 0; i < batch.num_segments; ++i) {
    const cuda::NumberedSegment& segment = batch.segments[i];
    totals[segment.index] = ordered_sum_on_host(
        {sums + batch.first_tile[i] * cuda::kNormBlocksOfTile, segment.num_blocks()});
  }
}

/// cuda::square_norms().
inline void square_norms_on_host(std::span<const NormSegment> segments, std::span<double> sums) {
  cuda::check_segments(segments);
  std::ranges::fill(sums, 0.0);
  for (const cuda::NormBatch& batch : cuda::norm_batches(segments)) {
    std::vector<double> workspace(cuda::workspace_of(batch));
    add_lanes_on_host(batch, workspace.data());
    add_blocks_on_host(batch, workspace.data(), sums.data());
  }
}

}  // namespace castor::testing
