#pragma once

// Internal to csrc/optim.

#include <cstddef>

#include "optim/adam.h"

namespace castor::detail {

/// Updates the kSplitInt8 segment's elements from `begin` on, `num_blocks` whole blocks, with the
/// bits that the loop for every instruction set gives them. Needs Isa::kAvx512.
void update_int8_avx512(const AdamSegment& segment, std::size_t begin, std::size_t num_blocks);

}  // namespace castor::detail
