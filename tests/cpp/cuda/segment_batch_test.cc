#include "cuda/segment_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace castor {
namespace {

struct Segment {
  std::size_t numel = 0;
  std::size_t index = 0;
};

using Batch = cuda::SegmentBatch<Segment>;

TEST(SegmentBatchTest, CoversEveryElementOfEverySegmentOnce) {
  std::vector<Segment> segments;
  for (const std::size_t numel : {5u, 0u, 256u, 257u, 0u, 1u, 5000u})
    segments.push_back({.numel = numel});
  for (std::size_t i = 0; i < 2 * Batch::kCapacity; ++i)
    segments.push_back({.numel = 3 + 20 * i});
  for (std::size_t i = 0; i < segments.size(); ++i)
    segments[i].index = i;  // tells them apart
  std::vector<std::vector<int>> visits(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i)
    visits[i].resize(segments[i].numel);
  for (const auto& batch : cuda::make_batches<Segment>(segments, 256)) {
    ASSERT_GE(batch.num_segments, 1u);
    ASSERT_LE(batch.num_segments, Batch::kCapacity);
    for (std::uint32_t block = 0; block < batch.num_tiles; ++block) {
      const auto tile = batch.tile(block, 256);
      const Segment& segment = batch.segments[tile.segment];
      ASSERT_LT(tile.begin, segment.numel);
      for (std::size_t i = tile.begin; i < std::min(segment.numel, tile.begin + 256); ++i)
        ++visits[segment.index][i];
    }
  }
  for (const std::vector<int>& counts : visits)
    EXPECT_TRUE(std::ranges::all_of(counts, [](int count) { return count == 1; }));
}

TEST(SegmentBatchTest, NoSegmentsMakeNoBatch) {
  EXPECT_TRUE(cuda::make_batches<Segment>({}, 256).empty());
}

}  // namespace
}  // namespace castor
