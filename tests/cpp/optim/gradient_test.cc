#include "optim/gradient.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "optim/adam_reference.h"
#include "optim/test_support.h"

namespace castor {
namespace {

/// `numel` gradients of `type`, as bytes, `skew` elements off alignment.
class Gradients {
 public:
  Gradients(std::size_t numel, ScalarType type, std::size_t skew = 0)
      : numel_(numel), type_(type), skew_(skew), bytes_((numel + skew + 1) * size_of(type)) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel; ++i)
      set(i, normal(random));
  }

  void set(std::size_t i, float value) {
    if (type_ == ScalarType::kFloat32) {
      std::memcpy(at(i), &value, 4);
    } else {
      const std::uint16_t bits = testing::reference_round(value, type_);
      std::memcpy(at(i), &bits, 2);
    }
  }

  [[nodiscard]] double get(std::size_t i) const {
    float value = 0;
    std::uint16_t bits = 0;
    const auto* const from = bytes_.data() + (i + skew_) * size_of(type_);
    if (type_ == ScalarType::kFloat32) {
      std::memcpy(&value, from, 4);
    } else {
      std::memcpy(&bits, from, 2);
      value = testing::reference_load(bits, type_);
    }
    return value;
  }

  /// The order gradient.h promises, one element at a time.
  [[nodiscard]] double reference_square_norm() const {
    double total = 0;
    for (std::size_t block = 0; block < numel_; block += 4096) {
      double lanes[16] = {};
      for (std::size_t i = block; i < std::min(block + 4096, numel_); ++i) {
        lanes[(i - block) % 16] += get(i) * get(i);
      }
      for (int width = 8; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane)
          lanes[lane] += lanes[lane + width];
      }
      total += lanes[0];
    }
    return total;
  }

  [[nodiscard]] unsigned char* at(std::size_t i) {
    return bytes_.data() + (i + skew_) * size_of(type_);
  }
  [[nodiscard]] void* data() { return at(0); }
  [[nodiscard]] std::size_t num_bytes() const { return numel_ * size_of(type_); }

 private:
  std::size_t numel_;
  ScalarType type_;
  std::size_t skew_;
  std::vector<unsigned char> bytes_;
};

class GradientTest : public ::testing::TestWithParam<std::tuple<Isa, ScalarType>> {
 protected:
  [[nodiscard]] static Isa isa() { return std::get<0>(GetParam()); }
  [[nodiscard]] static ScalarType type() { return std::get<1>(GetParam()); }
};

TEST_P(GradientTest, CopiesAndSumsInTheOneOrderForEveryLengthAndThreadCount) {
  for (const std::size_t numel : {0u, 1u, 15u, 16u, 17u, 4095u, 4097u, 1'000'007u}) {
    Gradients gradients(numel, type(), 1);
    const double expected = gradients.reference_square_norm();
    for (const std::size_t num_threads : {0u, 1u, 2u, 5u}) {
      testing::BackwardsExecutor executor(num_threads);
      std::vector<unsigned char> copy(gradients.num_bytes() + 8, 0xA5);
      const double sum =
          detail::copy_and_square_norm(num_threads == 0 ? nullptr : &executor, copy.data() + 4,
                                       gradients.data(), numel, type(), isa());
      EXPECT_EQ(sum, expected) << numel << " elements, " << num_threads << " threads";
      EXPECT_EQ(std::memcmp(copy.data() + 4, gradients.data(), gradients.num_bytes()), 0);
      EXPECT_EQ(copy[3], 0xA5);
      EXPECT_EQ(copy[gradients.num_bytes() + 4], 0xA5);
    }
  }
}

TEST_P(GradientTest, WithoutADestinationOnlySums) {
  Gradients gradients(10'000, type());
  const Gradients before = gradients;
  const double expected = gradients.reference_square_norm();
  const auto sum = [&](void* dst) {
    return detail::copy_and_square_norm(nullptr, dst, gradients.data(), 10'000, type(), isa());
  };
  EXPECT_EQ(sum(nullptr), expected);
  EXPECT_EQ(sum(gradients.data()), expected);
  EXPECT_EQ(gradients.reference_square_norm(), before.reference_square_norm());
}

TEST_P(GradientTest, OneNonFiniteElementAnywhereMakesTheSumNonFinite) {
  testing::BackwardsExecutor executor(2);
  constexpr std::size_t kNumel = 300'001;
  for (const std::size_t position : {std::size_t{0}, std::size_t{100'003}, kNumel - 1}) {
    for (const float bad :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::quiet_NaN()}) {
      Gradients gradients(kNumel, type());
      gradients.set(position, bad);
      const double sum =
          detail::copy_and_square_norm(&executor, nullptr, gradients.data(), kNumel, type(), isa());
      EXPECT_FALSE(std::isfinite(sum)) << position;
      EXPECT_EQ(std::isnan(sum), std::isnan(bad));
    }
  }
}

TEST_P(GradientTest, TheLargestFiniteElementsDoNotOverflow) {
  Gradients gradients(70'000, type());
  const float largest = type() == ScalarType::kFloat16 ? 65504.0f : 3.3e38f;
  for (std::size_t i = 0; i < 70'000; ++i)
    gradients.set(i, largest);
  const double sum =
      detail::copy_and_square_norm(nullptr, nullptr, gradients.data(), 70'000, type(), isa());
  EXPECT_EQ(sum, gradients.reference_square_norm());
  EXPECT_TRUE(std::isfinite(sum));
}

INSTANTIATE_TEST_SUITE_P(
    EverySupportedIsa, GradientTest,
    ::testing::Combine(::testing::ValuesIn(supported_isas().begin(), supported_isas().end()),
                       ::testing::Values(ScalarType::kFloat32, ScalarType::kBFloat16,
                                         ScalarType::kFloat16)),
    [](const auto& test) {
      return std::string(to_string(std::get<0>(test.param))) + "_" +
             std::string(to_string(std::get<1>(test.param)));
    });

TEST(GradientExecutorTest, ShortGradientsStayOnTheCallingThread) {
  testing::InlineExecutor executor;
  Gradients small(65'536, ScalarType::kFloat32);
  (void)copy_and_square_norm(&executor, nullptr, small.data(), 65'536, ScalarType::kFloat32);
  EXPECT_EQ(executor.num_tasks(), 0u);
  Gradients large(65'537, ScalarType::kFloat32);
  (void)copy_and_square_norm(&executor, nullptr, large.data(), 65'537, ScalarType::kFloat32);
  EXPECT_EQ(executor.num_tasks(), 2u);
}

}  // namespace
}  // namespace castor
