#include "cuda/mean_body.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "cuda/host_kernels.h"
#include "cuda/mean_cases.h"

namespace castor {
namespace {

TEST(MeanBodyTest, GivesTheHostsBitsInPlaceAndBeside) {
  testing::for_each_mean([](const testing::MeanCase& one) {
    std::vector<std::byte> beside(one.numel * size_of(one.type));
    testing::average_on_host(beside.data(), one.parts.data(), one.count, one.numel, one.type);
    testing::expect_mean(one, beside);
    std::vector<std::byte> in_place = one.parts;
    testing::average_on_host(in_place.data(), in_place.data(), one.count, one.numel, one.type);
    in_place.resize(beside.size());
    EXPECT_EQ(in_place, beside);
  });
}

TEST(MeanBodyTest, ATypeWithoutArithmeticIsRefused) {
  EXPECT_THROW(testing::average_on_host(nullptr, nullptr, 2, 0, ScalarType::kUInt8),
               InvalidArgument);
}

}  // namespace
}  // namespace castor
