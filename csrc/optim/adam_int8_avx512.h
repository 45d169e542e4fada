#pragma once

// Internal to csrc/optim.

#include <cstddef>

#include "optim/adam.h"

namespace castor::detail {

/// Updates `num_blocks` whole blocks of a kSplitInt8 segment from element `begin` on, a multiple of
/// kMomentBlock. The bits are those of the loop for every instruction set. Needs Isa::kAvx512; does
/// not exist on other processors than x86-64.
void update_int8_avx512(WeightDecayMode mode, const AdamSegment& segment, std::size_t begin,
                        std::size_t num_blocks);

}  // namespace castor::detail
