#include "core/arrived_gradients.h"

#include <gtest/gtest.h>

#include <vector>

namespace castor {
namespace {

/// Two modules in a chunk each, of two parameters and of one.
ChunkLayout two_chunks() {
  return ChunkLayout({{"a.weight", 32, ScalarType::kFloat32, true},
                      {"a.bias", 16, ScalarType::kFloat32, true},
                      {"b.weight", 64, ScalarType::kFloat32, true}},
                     {{"a", {ParamId{0}, ParamId{1}}, {}}, {"b", {ParamId{2}}, {}}},
                     {.chunk_bytes = 256, .world_size = 1});
}

std::vector<bool> added(ArrivedGradients& gradients, const std::vector<std::uint32_t>& params) {
  std::vector<bool> complete;
  for (const std::uint32_t param : params) {
    complete.push_back(gradients.add(ParamId{param}));
  }
  return complete;
}

TEST(ArrivedGradientsTest, AChunkIsCompleteWithTheLastOfItsParameters) {
  const ChunkLayout layout = two_chunks();
  ASSERT_EQ(layout.chunks().size(), 2);
  ArrivedGradients gradients(layout);
  EXPECT_EQ(added(gradients, {1, 2, 0}), (std::vector<bool>{false, true, true}));
}

TEST(ArrivedGradientsTest, PartsOfAGradientCountOnce) {
  const ChunkLayout layout = two_chunks();
  ArrivedGradients gradients(layout);
  EXPECT_EQ(added(gradients, {0, 0, 0, 1}), (std::vector<bool>{false, false, false, true}));
}

TEST(ArrivedGradientsTest, AnotherPassAfterACompleteOneBeginsAnew) {
  const ChunkLayout layout = two_chunks();
  ArrivedGradients gradients(layout);
  EXPECT_EQ(added(gradients, {0, 1, 1, 0}), (std::vector<bool>{false, true, false, true}));
}

TEST(ArrivedGradientsTest, AStepLeavesNothingToTheNext) {
  const ChunkLayout layout = two_chunks();
  ArrivedGradients gradients(layout);
  EXPECT_FALSE(gradients.add(ParamId{0}));
  gradients.forget(layout.place(ParamId{0}).chunk);
  EXPECT_EQ(added(gradients, {1, 0}), (std::vector<bool>{false, true}));
}

}  // namespace
}  // namespace castor
