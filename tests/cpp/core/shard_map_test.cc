#include "core/shard_map.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace castor {
namespace {

ChunkLayout random_layout(std::size_t ranks, std::mt19937& random) {
  std::vector<ParamSpec> params;
  ModuleSpec module{"module", {}, std::nullopt};
  for (std::size_t i = 0; i < 12; ++i) {
    params.push_back(
        {.name = "p" + std::to_string(i), .numel = random() % 3000, .type = ScalarType::kBFloat16});
    module.params.push_back(ParamId{static_cast<std::uint32_t>(i)});
  }
  return ChunkLayout(std::move(params), {module},
                     {.chunk_bytes = 4096 * ranks, .world_size = ranks, .param_alignment = 512});
}

TEST(ShardMapTest, OfAProcessThatIsAloneEverythingIsItsOwn) {
  std::mt19937 random(1);
  const ChunkLayout layout = random_layout(1, random);
  const ShardMap shards(layout);
  for (std::size_t i = 0; i < layout.params().size(); ++i) {
    const Piece piece = shards.piece(ParamId{static_cast<std::uint32_t>(i)});
    EXPECT_EQ(piece.first_element, 0);
    EXPECT_EQ(piece.numel, layout.params()[i].numel);
  }
}

TEST(ShardMapTest, EveryElementIsOneRanksAndShardsAreEqual) {
  std::mt19937 random(2);
  for (std::size_t ranks = 2; ranks <= 5; ++ranks) {
    const ChunkLayout layout = random_layout(ranks, random);
    for (std::size_t i = 0; i < layout.params().size(); ++i) {
      const ParamId param{static_cast<std::uint32_t>(i)};
      const ParamPlace place = layout.place(param);
      std::size_t next = 0;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const ShardMap shards(layout, rank);
        const Piece piece = shards.piece(param);
        if (piece.numel == 0) {
          continue;
        }
        EXPECT_EQ(piece.first_element, next);
        EXPECT_EQ(piece.first_element % (512 / 2), 0) << "a block is cut";
        EXPECT_GE(place.offset + piece.first_element, shards.first(place.chunk));
        EXPECT_LE(place.offset + piece.first_element + piece.numel,
                  shards.first(place.chunk) + shards.numel(place.chunk));
        EXPECT_EQ(ShardMap(layout, 0).piece(param, rank).numel, piece.numel);
        next += piece.numel;
      }
      EXPECT_EQ(next, layout.param(param).numel);
    }
    for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
      const ShardMap shards(layout, ranks - 1);
      const ChunkId chunk{static_cast<std::uint32_t>(i)};
      EXPECT_EQ((shards.first(chunk) + shards.numel(chunk)) * 2, layout.chunk(chunk).used_bytes);
    }
  }
}

}  // namespace
}  // namespace castor
