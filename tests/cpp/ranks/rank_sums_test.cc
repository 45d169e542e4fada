#include "ranks/rank_sums.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include "core/thread_collectives.h"
#include "optim/rounding.h"

namespace castor {
namespace {

/// Rounds as torch does.
template <ScalarType type>
auto rounded(float value) {
  if constexpr (type == ScalarType::kBFloat16) {
    return round_to_even_bfloat16(value);
  } else {
    return ScalarCodec<type>::round(value);
  }
}

template <ScalarType type>
void expect_sums(std::size_t ranks, std::size_t numel) {
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;
  const auto values_of = [&](std::size_t rank) {
    std::minstd_rand random(static_cast<unsigned>(rank) + 1);
    std::vector<Storage> values(numel);
    for (Storage& value : values) {
      value = Codec::round(static_cast<float>(random() % 1000) / 7.0F - 50.0F);
    }
    return values;
  };
  std::vector<float> sums(numel, 0.0F);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::vector<Storage> values = values_of(rank);
    for (std::size_t i = 0; i < numel; ++i) {
      sums[i] = rank == 0 ? Codec::load(values[i]) : sums[i] + Codec::load(values[i]);
    }
  }
  ThreadRanks threads(ranks, 4);
  threads.run([&](Collectives& group) {
    RankSums adder(group);
    for (int repetition = 0; repetition < 2; ++repetition) {
      std::vector<Storage> values = values_of(group.rank());
      adder.sum(std::as_writable_bytes(std::span(values)), type);
      for (std::size_t i = 0; i < numel; ++i) {
        ASSERT_EQ(Codec::load(values[i]), Codec::load(rounded<type>(sums[i])))
            << "rank " << group.rank() << ", element " << i;
      }
    }
  });
}

// Nothing, less than an element a rank, one barrier, windows with and without a remainder.
TEST(RankSumsTest, EveryRankHasTheSumInRankOrder) {
  for (const std::size_t ranks : {1, 2, 3, 4}) {
    for (const std::size_t numel : {0, 1, 2, 1000, 16384, 16385, 100000, 2200001}) {
      expect_sums<ScalarType::kFloat32>(ranks, numel);
    }
    expect_sums<ScalarType::kBFloat16>(ranks, 70001);
    expect_sums<ScalarType::kFloat16>(ranks, 70001);
  }
}

}  // namespace
}  // namespace castor
