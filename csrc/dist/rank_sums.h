#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/collectives.h"
#include "core/scalar_type.h"

namespace castor {

/// Makes activations and their gradients the sum of what the ranks of a layer have, on every rank
/// the same bits: added up in rank order in fp32, rounded once. For a few MiB at a time; what is
/// larger goes through in windows. One call at a time.
class RankSums {
 public:
  /// `ranks` outlives this.
  explicit RankSums(Collectives& ranks) : ranks_(ranks) {}

  /// `values`: whole elements; only their alignment is needed.
  void sum(std::span<std::byte> values, ScalarType type);

 private:
  void sum_gathered(std::span<std::byte> values, ScalarType type);
  void sum_parts(std::span<std::byte> values, ScalarType type);

  Collectives& ranks_;
  std::vector<std::byte> window_;
};

}  // namespace castor
