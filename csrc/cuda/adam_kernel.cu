#include "cuda/adam_kernel.h"

#include <vector>

#include "cuda/adam_body.h"
#include "cuda/launch.h"
#include "cuda/segment_batch.h"
#include "cuda/tile_kernel.h"
#include "optim/adam_check.h"

namespace castor::cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

using AdamBatch = SegmentBatch<AdamSegment>;

/// A thread block updates one block of moments; a segment's last block may be short.
template <WeightDecayMode mode>
__global__ __launch_bounds__(kMomentBlock) void update_blocks(
    const __grid_constant__ AdamBatch batch) {
  using Body = BlockBody<mode>;
  constexpr unsigned kWarps = kMomentBlock / kWarp;
  __shared__ typename Body::Magnitudes of_warp[kWarps];
  const AdamBatch::Tile tile = batch.tile(blockIdx.x, kMomentBlock);
  const AdamSegment& segment = batch.segments[tile.segment];
  const std::size_t i = tile.begin + threadIdx.x;
  const bool has_element = i < segment.numel;
  typename Body::Moments moments{0.0f, 0.0f};  // the least magnitude, where there is no element
  if (has_element)
    moments = Body::update(segment, i);
  typename Body::Magnitudes largest = Body::magnitudes(moments);
  largest.exp_avg = __reduce_max_sync(kAllLanes, largest.exp_avg);
  largest.exp_avg_sq = __reduce_max_sync(kAllLanes, largest.exp_avg_sq);
  if (threadIdx.x % kWarp == 0)
    of_warp[threadIdx.x / kWarp] = largest;
  // Also: nobody overwrites the block's old scales before everybody has read them.
  __syncthreads();
#pragma unroll
  for (unsigned warp = 0; warp < kWarps; ++warp) {
    largest.exp_avg =
        largest.exp_avg > of_warp[warp].exp_avg ? largest.exp_avg : of_warp[warp].exp_avg;
    largest.exp_avg_sq = largest.exp_avg_sq > of_warp[warp].exp_avg_sq ? largest.exp_avg_sq
                                                                       : of_warp[warp].exp_avg_sq;
  }
  const MomentScales scales = Body::scales_for(largest);
  if (has_element)
    Body::encode(segment, i, moments, scales);
  if (threadIdx.x == 0)
    segment.scales[i / kMomentBlock] = scales;
}

using Kernel = void (*)(AdamBatch);

struct Variant {
  StateFormat format;
  ScalarType type;
  bool l2;
  std::size_t tile_elements;
  Kernel kernel;
};

bool has_l2(const AdamSegment& segment) { return segment.coefficients.l2_factor != 0.0f; }

template <WeightDecayMode mode>
void append_variants(std::vector<Variant>& variants) {
  constexpr bool kL2 = mode == WeightDecayMode::kL2;
  const auto add_fp32 = [&]<ScalarType type>() {
    variants.push_back(
        {StateFormat::kFp32, type, kL2, kTileElements, &update_elements<Fp32Body<type, mode>>});
  };
  add_fp32.template operator()<ScalarType::kFloat32>();
  add_fp32.template operator()<ScalarType::kBFloat16>();
  add_fp32.template operator()<ScalarType::kFloat16>();
  constexpr ScalarType kBf16 = ScalarType::kBFloat16;
  variants.push_back({StateFormat::kSplit, kBf16, kL2, kTileElements,
                      &update_elements<SplitBody<castor::detail::Fp32Moments, mode>>});
  variants.push_back({StateFormat::kSplitBf16, kBf16, kL2, kTileElements,
                      &update_elements<SplitBody<castor::detail::Bf16Moments, mode>>});
  variants.push_back({StateFormat::kSplitInt8, kBf16, kL2, kMomentBlock, &update_blocks<mode>});
}

}  // namespace

void adam_update(std::span<const AdamSegment> segments, cudaStream_t stream) {
  for (const AdamSegment& segment : segments)
    castor::detail::check_segment(segment);
  std::vector<Variant> variants;
  append_variants<WeightDecayMode::kDecoupled>(variants);
  append_variants<WeightDecayMode::kL2>(variants);
  std::vector<AdamSegment> alike;
  for (const Variant& variant : variants) {
    alike.clear();
    for (const AdamSegment& segment : segments) {
      if (segment.format == variant.format && segment.type == variant.type &&
          has_l2(segment) == variant.l2) {
        alike.push_back(segment);
      }
    }
    for (const AdamBatch& batch : make_batches<AdamSegment>(alike, variant.tile_elements))
      launch("the Adam kernel", variant.kernel, batch.num_tiles, kTileThreads, stream, batch);
  }
}

}  // namespace castor::cuda
