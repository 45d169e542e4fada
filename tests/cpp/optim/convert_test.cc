#include "optim/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>

#include "optim/adam_reference.h"
#include "optim/test_support.h"

namespace castor {
namespace {

using testing::Array;

class ConvertTest : public ::testing::TestWithParam<ScalarType> {};

TEST_P(ConvertTest, EveryLengthAndAlignmentRoundsAndWidensAsSpecified) {
  std::mt19937 random(3);
  testing::BackwardsExecutor executor(3);
  for (const std::size_t numel : {0u, 1u, 15u, 17u, 4097u, 200'003u}) {
    for (Executor* const used :
         {static_cast<Executor*>(nullptr), static_cast<Executor*>(&executor)}) {
      Array<float> master(numel, 3);
      Array<std::uint16_t> param(numel, 5);
      Array<float> widened(numel, 1);
      for (std::size_t i = 0; i < numel; ++i) {
        const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        master[i] = std::isnan(value) ? 0.0f : value;
      }
      master_to_param(used, param.data(), master.data(), numel, GetParam());
      param_to_master(used, widened.data(), param.data(), numel, GetParam());
      for (std::size_t i = 0; i < numel; ++i) {
        ASSERT_EQ(param[i], testing::reference_round(master[i], GetParam())) << i;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(widened[i]),
                  std::bit_cast<std::uint32_t>(testing::reference_load(param[i], GetParam())));
      }
      EXPECT_TRUE(param.guards_intact());
      EXPECT_TRUE(widened.guards_intact());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ConvertTest,
                         ::testing::Values(ScalarType::kBFloat16, ScalarType::kFloat16),
                         [](const auto& test) { return std::string(to_string(test.param)); });

TEST(ConvertFloat32Test, KeepsEveryBit) {
  Array<float> master(1003, 1);
  Array<float> param(1003, 2);
  for (std::size_t i = 0; i < master.size(); ++i) {
    master[i] = std::bit_cast<float>(static_cast<std::uint32_t>(i));  // subnormals
  }
  master[7] = std::bit_cast<float>(0x7fc12345u);
  master_to_param(nullptr, param.data(), master.data(), master.size(), ScalarType::kFloat32);
  EXPECT_TRUE(std::memcmp(param.data(), master.data(), 4 * master.size()) == 0);
  Array<float> back(1003);
  param_to_master(nullptr, back.data(), param.data(), back.size(), ScalarType::kFloat32);
  EXPECT_TRUE(std::memcmp(back.data(), master.data(), 4 * master.size()) == 0);
}

}  // namespace
}  // namespace castor
