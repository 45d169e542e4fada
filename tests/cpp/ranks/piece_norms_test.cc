#include "ranks/piece_norms.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "core/chunk_layout.h"
#include "core/shard_map.h"
#include "core/thread_collectives.h"
#include "optim/gradient.h"
#include "parallel/thread_executor.h"

namespace castor {
namespace {

class PieceNormsTest : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PieceNormsTest, ::testing::Values(1, 2, 3, 7));

// Gradients that are cut within blocks, between them, by no cut and by several.
TEST_P(PieceNormsTest, EveryRankHasTheBitsOfWholeGradients) {
  const std::size_t size = GetParam();
  std::vector<ParamSpec> params;
  const std::size_t numels[] = {1, 17, 4096, 300000, 5000, 8192, 40, 33, 12289, 700001};
  for (const std::size_t numel : numels) {
    params.push_back({.name = std::to_string(numel), .numel = numel});
  }
  std::vector<ModuleSpec> modules(1);
  for (std::uint32_t i = 0; i < params.size(); ++i) {
    modules[0].params.push_back(ParamId{i});
  }
  const ChunkLayout layout(params, modules, {.chunk_bytes = 1 << 17, .world_size = size});
  std::vector<std::vector<float>> chunks;
  std::minstd_rand random(5);
  for (const ChunkSpec& chunk : layout.chunks()) {
    std::vector<float>& values = chunks.emplace_back(chunk.used_bytes / sizeof(float));
    for (float& value : values) {
      value = static_cast<float>(random() % 100000) * 1e-4F - 5.0F;
    }
  }
  ThreadRanks threads(size, 4);
  threads.run([&](Collectives& ranks) {
    const ShardMap shards(layout, ranks.rank());
    std::vector<GradientPiece> pieces;
    std::vector<double> expected;
    for (std::uint32_t i = 0; i < params.size(); ++i) {
      const ParamPlace place = layout.place(ParamId{i});
      const float* const whole = chunks[index(place.chunk)].data() + place.offset;
      const Piece piece = shards.piece(ParamId{i});
      pieces.push_back({.data = reinterpret_cast<const std::byte*>(whole + piece.first_element),
                        .first_element = piece.first_element,
                        .numel = piece.numel,
                        .whole_numel = params[i].numel,
                        .cut = index(place.chunk)});
      expected.push_back(
          copy_and_square_norm(nullptr, nullptr, whole, params[i].numel, ScalarType::kFloat32));
    }
    ThreadExecutor executor(2);
    RankFigures figures;
    const auto found = square_norms(ranks, executor, pieces, chunks.size(), figures);
    EXPECT_EQ(found, expected);
    EXPECT_EQ(figures.bytes_sent(), square_norm_bytes(size, pieces.size(), chunks.size()));
  });
}

}  // namespace
}  // namespace castor
