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

constexpr std::size_t kLengths[] = {0,    1,    15,      16,        17,     4095,
                                    4096, 4097, 100'003, 128 << 12, 700'001};

double by_kernels(const void* data, std::size_t numel, ScalarType type) {
  const NormSegment segment{.data = data, .numel = numel, .type = type};
  double sum = -1.0;
  testing::square_norms_on_host({&segment, 1}, {&sum, 1});
  return sum;
}

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
    EXPECT_EQ(by_kernels(values.data(), numel, type),
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
    EXPECT_FALSE(std::isfinite(by_kernels(values.data(), values.size(), ScalarType::kFloat32)));
  }
}

TEST(NormBodyTest, OneBatchHasSegmentsOfEveryTypeAndLength) {
  std::vector<std::vector<float>> values;
  std::vector<NormSegment> segments;
  constexpr ScalarType kTypes[] = {ScalarType::kFloat32, ScalarType::kBFloat16,
                                   ScalarType::kFloat16};
  for (std::size_t i = 0; i < 143; ++i) {
    values.emplace_back(i % 10 == 7 ? 0 : 1 + i * i * 7 % 9001, 1.0f + static_cast<float>(i));
    segments.push_back(
        {.data = values[i].data(), .numel = values[i].size(), .type = kTypes[i % 3]});
  }
  EXPECT_EQ(cuda::norm_batches(segments).size(), 1u);
  std::vector<double> sums(segments.size(), -1.0);
  testing::square_norms_on_host(segments, sums);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    EXPECT_EQ(sums[i], copy_and_square_norm(nullptr, nullptr, segments[i].data, segments[i].numel,
                                            segments[i].type))
        << i;
  }
}

TEST(NormBodyTest, ASegmentWithoutDataOrArithmeticIsRefused) {
  double sum = 0.0;
  const NormSegment no_data{.numel = 3};
  EXPECT_THROW(testing::square_norms_on_host({&no_data, 1}, {&sum, 1}), InvalidArgument);
  const NormSegment bytes{.data = &sum, .numel = 3, .type = ScalarType::kUInt8};
  EXPECT_THROW(testing::square_norms_on_host({&bytes, 1}, {&sum, 1}), InvalidArgument);
}

}  // namespace
}  // namespace castor
