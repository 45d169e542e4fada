#pragma once

// Internal to csrc/optim.

#include <cstddef>

#include "optim/adam.h"

namespace castor::detail {

/// Updates `num_blocks` whole blocks of a kSplitInt8 segment from element `begin` on, a multiple of
/// kMomentBlock, with the bits that the loop for every instruction set gives them. Needs
/// Isa::kAvx512; not there on other processors than x86-64.
void update_int8_avx512(WeightDecayMode mode, const AdamSegment& segment, std::size_t begin,
                        std::size_t num_blocks);

}  // namespace castor::detail
