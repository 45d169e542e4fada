#pragma once

// Internal to csrc/cuda; contains nothing but plain C++.

#include <cstddef>

#include "optim/elementwise.h"
#include "optim/gradient.h"
#include "optim/rounding.h"

namespace castor::cuda {

/// Sum of squares of one lane of one block of kNormBlock elements (optim/gradient.h). A tensor's
/// last block has fewer.
template <ScalarType type>
struct LaneSquares {
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;

  CASTOR_ELEMENTWISE static double sum(const Storage* block, std::size_t count,
                                       std::size_t lane) noexcept {
    double sum = 0.0;
    for (std::size_t i = lane; i < count; i += kNormLanes) {
      const double value = Codec::load(block[i]);
      sum += value * value;
    }
    return sum;
  }
};

}  // namespace castor::cuda
