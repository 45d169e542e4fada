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

/// As average, of parts that come in several calls, those of the first in front. `sums`, of
/// `numel`, become those of all so far: they begin with this call's where `begun` is false.
void add_up(Executor* executor, float* sums, bool begun, const void* parts, std::size_t count,
            std::size_t numel, ScalarType type);
/// ... and the last call: `total` is how many parts there were in all. nullptr for `sums`: it is
/// the first call as well.
void average_last(Executor* executor, void* mean, const float* sums, const void* parts,
                  std::size_t count, std::size_t total, std::size_t numel, ScalarType type);

/// As average, without the division: the sum, rounded once.
void sum(void* total, const void* parts, std::size_t count, std::size_t numel, ScalarType type);

namespace detail {
/// What average and its kin do with parts.
struct PartSums {
  const void* parts = nullptr;
  std::size_t count = 0;
  std::size_t numel = 0;
  ScalarType type{};
  const float* before = nullptr;  ///< sums to which they are added; nullptr: none
  float* sums = nullptr;          ///< where they go; nullptr: into ...
  void* mean = nullptr;           ///< ... the sums over ...
  float divisor = 1.0F;           ///< ... this, rounded
};

/// On a given one of supported_isas().
void average(Executor* executor, const PartSums& work, Isa isa);
}  // namespace detail

}  // namespace castor
