#pragma once

// Internal to csrc/optim.

#include <cstddef>

#include "optim/adam.h"
#include "optim/isa.h"

namespace castor::detail {

/// Updates elements [begin, begin + count) of a segment whose format is not kFp32. For kSplitInt8
/// begin is a multiple of kMomentBlock, and so is count unless it reaches the segment's end.
void update_split(Isa isa, const AdamSegment& segment, std::size_t begin, std::size_t count);

}  // namespace castor::detail
