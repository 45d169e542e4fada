#include "cuda/norm_body.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cuda/host_kernels.h"
#include "optim/adam_reference.h"
#include "optim/test_support.h"

namespace castor {
namespace {

constexpr std::size_t kLengths[] = {0, 1, 15, 16, 17, 4095, 4096, 4097, 100'003};

template <ScalarType type>
void expect_the_cpus_bits() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const std::size_t numel : kLengths) {
    std::vector<typename ScalarCodec<type>::Storage> values(numel);
    for (std::size_t i = 0; i < numel; ++i) {
      const float value = i % 97 == 5 ? 0x1p-140f : normal(random) * (i % 3 == 0 ? 1e-3f : 1e3f);
      if constexpr (type == ScalarType::kFloat32) {
        values[i] = value;
      } else {
        values[i] = testing::reference_round(value, type);
      }
    }
    EXPECT_EQ(testing::norm_kernels_on_host<type>(values.data(), numel),
              copy_and_square_norm(nullptr, nullptr, values.data(), numel, type))
        << numel;
  }
}

TEST(NormBodyTest, GivesTheCpusBitsInFloat32) { expect_the_cpus_bits<ScalarType::kFloat32>(); }
TEST(NormBodyTest, GivesTheCpusBitsInBFloat16) { expect_the_cpus_bits<ScalarType::kBFloat16>(); }
TEST(NormBodyTest, GivesTheCpusBitsInFloat16) { expect_the_cpus_bits<ScalarType::kFloat16>(); }

TEST(NormBodyTest, ANonFiniteElementShows) {
  for (const float bad : {testing::kInfinity, testing::kNaN}) {
    std::vector<float> values(5000, 1.0f);
    values[4097] = bad;
    EXPECT_FALSE(std::isfinite(
        testing::norm_kernels_on_host<ScalarType::kFloat32>(values.data(), values.size())));
  }
}

}  // namespace
}  // namespace castor
