#pragma once

#include <cstddef>

#include "core/executor.h"
#include "core/scalar_type.h"
#include "optim/isa.h"

namespace castor {

/// The mean of `count` gradients of `numel` elements each, which lie one behind the other from
/// `parts` on: summed in that order in fp32, divided by `count`, rounded once. So for a `count`
/// that is a power of two an fp32 mean has the bits of gradients of losses divided by it, added one
/// after the other. `mean` may be `parts`, and overlaps nothing else. All are of `type` and need
/// only its alignment. `executor` may be null: the calling thread does it all.
void average(Executor* executor, void* mean, const void* parts, std::size_t count,
             std::size_t numel, ScalarType type);

/// As average, without the division: the sum, rounded once.
void sum(void* total, const void* parts, std::size_t count, std::size_t numel, ScalarType type);

namespace detail {
/// The sum over `divisor`, on a given one of supported_isas().
void average(Executor* executor, void* mean, const void* parts, std::size_t count,
             std::size_t numel, float divisor, ScalarType type, Isa isa);
}  // namespace detail

}  // namespace castor
