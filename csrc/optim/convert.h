#pragma once

#include <cstddef>

#include "core/executor.h"
#include "core/scalar_type.h"

namespace castor {

// Conversions of arrays between the fp32 master and the working copy, with the rounding of
// adam_update (optim/rounding.h), so that a copy made here counts as unedited at the first update.
// Arrays must not overlap; pointers need only their element's alignment. `executor` may be null:
// the calling thread then does all the work. For kFloat32 both are plain copies.

/// Writes param = round(master). `param` is of `type`.
void master_to_param(Executor* executor, void* param, const float* master, std::size_t numel,
                     ScalarType type);

/// Writes master = float(param), exactly. `param` is of `type`.
void param_to_master(Executor* executor, float* master, const void* param, std::size_t numel,
                     ScalarType type);

}  // namespace castor
