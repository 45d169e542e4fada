#include "cuda/ordered_sum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cuda/host_kernels.h"

namespace castor {
namespace {

std::uint64_t bits_of(double value) { return std::bit_cast<std::uint64_t>(value); }

double one_by_one(const std::vector<double>& addends, double total = 0.0) {
  for (const double addend : addends)
    total += addend;
  return total;
}

void expect_the_bits_of_one_by_one(const std::vector<double>& addends) {
  EXPECT_EQ(bits_of(testing::ordered_sum_on_host(addends)), bits_of(one_by_one(addends)));
}

TEST(OrderedSumTest, UnitsAreThoseOfADouble) {
  for (const double value :
       {0.0, 0x1p-1074, 0x1.8p-1023, 0x1p-1022, 1.0, 0x1.fffffffffffffp0, 3e300})
    EXPECT_EQ(bits_of(cuda::value_of(cuda::units_of(value))), bits_of(value));
}

// Every distance of the last bits, every parity, below, at and above a tie.
TEST(OrderedSumTest, OneAdditionIsThatOfDoubles) {
  std::mt19937_64 random(3);
  std::size_t ties = 0;
  for (int exponent = -60; exponent <= 3; ++exponent) {
    for (const double total : {1.0, 1.0 + 0x1p-52, 1.5, 0x1.fffffffffffffp0, 0x1.ffffffffffffep0}) {
      std::vector<double> addends = {std::ldexp(1.0, exponent), std::ldexp(1.0 + 0x1p-52, exponent),
                                     std::ldexp(0x1.fffffffffffffp0, exponent),
                                     std::ldexp(1.5, exponent)};
      for (int i = 0; i < 100; ++i)
        addends.push_back(std::ldexp(1.0 + static_cast<double>(random() % 64) / 64, exponent));
      for (const double addend : addends) {
        const cuda::Units units = cuda::units_of(total);
        const std::uint64_t count =
            cuda::after(units.count, cuda::additions_of(addend, units.exponent));
        const double expected = total + addend;
        if (expected < 2.0) {
          ASSERT_EQ(bits_of(cuda::value_of({count, units.exponent})), bits_of(expected))
              << total << " + " << addend;
        } else {
          ASSERT_GE(count, cuda::kEndOfUnits) << total << " + " << addend;
        }
        ties += std::fabs((expected - total) - addend) == 0x1p-53;
      }
    }
  }
  EXPECT_GT(ties, 100u);
}

TEST(OrderedSumTest, CompositionIsAssociative) {
  std::mt19937_64 random(5);
  const auto any = [&] {
    const auto one = [&] {
      const std::uint64_t size = random() % 3;
      return size == 0 ? random() % 4 : size == 1 ? random() % cuda::kEndOfUnits : cuda::kManyUnits;
    };
    return cuda::Additions{one(), one()};
  };
  for (int i = 0; i < 10'000; ++i) {
    const cuda::Additions a = any(), b = any(), c = any();
    const cuda::Additions left = cuda::then(cuda::then(a, b), c);
    const cuda::Additions right = cuda::then(a, cuda::then(b, c));
    for (const std::uint64_t count : {cuda::kEndOfUnits / 2, cuda::kEndOfUnits / 2 + 1}) {
      const std::uint64_t stepwise = cuda::after(cuda::after(cuda::after(count, a), b), c);
      if (stepwise < cuda::kEndOfUnits) {
        ASSERT_EQ(cuda::after(count, left), stepwise);
        ASSERT_EQ(cuda::after(count, right), stepwise);
      } else {
        ASSERT_GE(cuda::after(count, left), cuda::kEndOfUnits);
        ASSERT_GE(cuda::after(count, right), cuda::kEndOfUnits);
      }
    }
  }
}

TEST(OrderedSumTest, ASumHasTheBitsOfOneThread) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (const std::size_t count :
       {0u, 1u, 127u, 128u, 129u, 4096u, 4224u, 4225u, 20'000u, 50'001u}) {
    std::vector<double> even(count), wide(count), coarse(count), rare(count), rising(count);
    for (std::size_t i = 0; i < count; ++i) {
      even[i] = 4096.0 * uniform(random);
      wide[i] = std::ldexp(uniform(random), static_cast<int>(random() % 120) - 60);
      coarse[i] = static_cast<double>(random() % 8) * 0x1p-43;  // many ties beside a total of 1000
      rare[i] = random() % 5000 == 0 ? uniform(random) : 0.0;
      rising[i] = std::ldexp(1.0, static_cast<int>(i / 64) - 300);
    }
    if (count > 0)
      coarse[0] = 1000.0;
    for (const auto& addends : {even, wide, coarse, rare, rising})
      expect_the_bits_of_one_by_one(addends);
  }
}

TEST(OrderedSumTest, ATotalMayComeToAPowerOfTwoByATie) {
  std::vector<double> addends(300, 0.0);
  addends[0] = 0x1.fffffffffffffp0;
  addends[200] = 0x1p-53;  // half a unit: to even, which is 2
  addends[201] = 0x1p-52;  // half a unit of the next power
  addends[202] = 0x1.8p-52;
  expect_the_bits_of_one_by_one(addends);
  EXPECT_EQ(testing::ordered_sum_on_host(addends), one_by_one(addends));
}

TEST(OrderedSumTest, InfinitiesAndNansAreWhatOneThreadMakesOfThem) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<double> addends(10'000, 1.0);
  addends[5000] = kInfinity;
  EXPECT_EQ(testing::ordered_sum_on_host(addends), kInfinity);
  addends[9000] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isnan(testing::ordered_sum_on_host(addends)));
  addends[5000] = 1.0;
  EXPECT_TRUE(std::isnan(testing::ordered_sum_on_host(addends)));
}

// A round adds 4096 sums, unless the total comes to a power of two in it: from 128 sums to 4096
// five times, and then always with the last one.
TEST(OrderedSumTest, ALargeParameterTakesFewRounds) {
  const std::vector<double> addends(128 << 10, 4096.0);  // of 2^29 elements
  std::size_t num_rounds = 0;
  EXPECT_EQ(testing::ordered_sum_on_host(addends, &num_rounds), 0x1p29);
  EXPECT_EQ(num_rounds, 36u);
}

}  // namespace
}  // namespace castor
