#include "ranks/rank_sums.h"

#include <algorithm>

#include "optim/average.h"

namespace castor {
namespace {

constexpr std::size_t kSumWindowBytes = std::size_t{4} << 20;
/// Up to this size all ranks send all they have, with one barrier instead of two.
constexpr std::size_t kGatheredBytes = std::size_t{64} << 10;

}  // namespace

void RankSums::sum(std::span<std::byte> values, ScalarType type) {
  while (!values.empty()) {
    const std::size_t whole = ranks_.size() * size_of(type);  // an element for each rank
    const std::size_t parts = std::min(values.size(), kSumWindowBytes) / whole * whole;
    const bool gathered = values.size() <= kGatheredBytes || parts == 0;
    const auto piece = values.first(gathered ? values.size() : parts);
    gathered ? sum_gathered(piece, type) : sum_parts(piece, type);
    values = values.subspan(piece.size());
  }
}

void RankSums::sum_gathered(std::span<std::byte> values, ScalarType type) {
  window_.resize(values.size() * ranks_.size());
  ranks_.all_gather(values, window_);
  castor::sum(values.data(), window_.data(), ranks_.size(), values.size() / size_of(type), type);
}

void RankSums::sum_parts(std::span<std::byte> values, ScalarType type) {
  window_.resize(values.size());
  ranks_.all_to_all(values, window_);
  const auto own = std::span(window_).first(values.size() / ranks_.size());
  castor::sum(own.data(), window_.data(), ranks_.size(), own.size() / size_of(type), type);
  ranks_.all_gather(own, values);
}

}  // namespace castor
