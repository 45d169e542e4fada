#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/collectives.h"
#include "core/scalar_type.h"

namespace castor {

/// Adds up activations, or their gradients, over the ranks of a layer: an all-reduce that gives
/// every rank the same bits. Values are added in rank order in fp32 and rounded once. For a few MiB
/// at a time; larger values go through in windows. One call at a time.
class RankSums {
 public:
  /// Takes the ranks, which outlive this.
  explicit RankSums(Collectives& ranks) : ranks_(ranks) {}

  /// Replaces `values` by the sum over the ranks. They are whole elements, and need only their
  /// alignment.
  void sum(std::span<std::byte> values, ScalarType type);

 private:
  void sum_gathered(std::span<std::byte> values, ScalarType type);
  void sum_parts(std::span<std::byte> values, ScalarType type);

  Collectives& ranks_;
  std::vector<std::byte> window_;
};

}  // namespace castor
