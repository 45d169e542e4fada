#include "optim/rounding.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "optim/adam_reference.h"

namespace castor {
namespace {

using testing::reference_load;
using testing::reference_round;

static_assert(round_to_bfloat16(1.0f) == 0x3f80);
static_assert(from_bfloat16(0x3f80) == 1.0f);
static_assert(round_to_float16(65519.0f) == 0x7bff && round_to_float16(65520.0f) == 0x7c00);
static_assert(from_float16(0x0001) == 0x1p-24f);

float next(float value) { return std::nextafter(value, std::numeric_limits<float>::infinity()); }
float previous(float value) { return std::nextafter(value, 0.0f); }

template <ScalarType type>
void expect_rounds_as_reference(float value) {
  for (const float signed_value : {value, -value}) {
    ASSERT_EQ(ScalarCodec<type>::round(signed_value), reference_round(signed_value, type))
        << std::hexfloat << signed_value;
  }
}

// Each number of the format, the exact tie above it, and the fp32 neighbours of both.
template <ScalarType type>
void expect_every_number_and_tie_rounds(std::uint16_t infinity) {
  for (std::uint16_t bits = 0; bits < infinity; ++bits) {
    const float value = reference_load(bits, type);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(ScalarCodec<type>::load(bits)),
              std::bit_cast<std::uint32_t>(value));
    const auto above = static_cast<std::uint16_t>(bits + 1);
    const double step = above < infinity ? static_cast<double>(reference_load(above, type)) - value
                                         : value - static_cast<double>(reference_load(
                                                       static_cast<std::uint16_t>(bits - 1), type));
    const auto tie = static_cast<float>(value + step / 2);
    for (const float sample :
         {value, next(value), previous(value), tie, next(tie), previous(tie)}) {
      expect_rounds_as_reference<type>(sample);
    }
  }
}

TEST(RoundingTest, EveryBFloat16AndEveryTieRoundsAsSpecified) {
  expect_every_number_and_tie_rounds<ScalarType::kBFloat16>(0x7f80);
}

TEST(RoundingTest, EveryFloat16AndEveryTieRoundsAsSpecified) {
  expect_every_number_and_tie_rounds<ScalarType::kFloat16>(0x7c00);
}

TEST(RoundingTest, RandomBitsRoundAsSpecified) {
  std::mt19937 random(1);
  for (int i = 0; i < 1'000'000; ++i) {
    const float value = std::fabs(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    if (std::isnan(value))
      continue;
    expect_rounds_as_reference<ScalarType::kBFloat16>(value);
    expect_rounds_as_reference<ScalarType::kFloat16>(value);
  }
}

TEST(RoundingTest, BFloat16TiesGoAwayFromZeroOrToTheEvenValue) {
  EXPECT_EQ(round_to_bfloat16(std::bit_cast<float>(0x3f808000u)), 0x3f81);  // even would be 3f80
  EXPECT_EQ(round_to_bfloat16(std::bit_cast<float>(0xbf808000u)), 0xbf81);
  EXPECT_EQ(round_to_bfloat16(std::bit_cast<float>(0x3f807fffu)), 0x3f80);
  EXPECT_EQ(round_to_even_bfloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);
  EXPECT_EQ(round_to_even_bfloat16(std::bit_cast<float>(0xbf818000u)), 0xbf82);
  EXPECT_EQ(round_to_even_bfloat16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_EQ(round_to_even_bfloat16(std::bit_cast<float>(0x7f7fffffu)), 0x7f80);
  EXPECT_EQ(round_to_even_bfloat16(std::bit_cast<float>(0xff800001u)), 0xffc0);
}

TEST(RoundingTest, AMasterIsItsBFloat16PlusASigned16BitRemainder) {
  std::mt19937 random(2);
  for (int i = 0; i < 1'000'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    if (std::isnan(std::bit_cast<float>(bits)))
      continue;
    const std::uint32_t high = std::uint32_t{round_to_bfloat16(std::bit_cast<float>(bits))} << 16;
    const auto remainder = static_cast<std::int32_t>(bits - high);
    ASSERT_GE(remainder, -0x8000);
    ASSERT_LE(remainder, 0x7fff);
  }
}

TEST(RoundingTest, NaNStaysNaNWithItsSign) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7fffffffu, 0x7fc00000u, 0x7f80ffffu}) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const auto value = std::bit_cast<float>(bits | sign);
      EXPECT_TRUE(std::isnan(from_bfloat16(round_to_bfloat16(value))));
      EXPECT_TRUE(std::isnan(from_float16(round_to_float16(value))));
      EXPECT_EQ(round_to_bfloat16(value) >> 15, sign >> 31);
      EXPECT_EQ(round_to_float16(value) >> 15, sign >> 31);
    }
  }
}

TEST(RoundingTest, SpecialFloat16ValuesLoad) {
  EXPECT_EQ(from_float16(0x7c00), std::numeric_limits<float>::infinity());
  EXPECT_EQ(from_float16(0xfc00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(from_float16(0x7c01)));
  EXPECT_TRUE(std::isnan(from_float16(0xffff)));
  EXPECT_TRUE(std::signbit(from_float16(0x8000)));
}

}  // namespace
}  // namespace castor
