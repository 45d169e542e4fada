#pragma once

#include <cstddef>
#include <cstdint>

#include "core/executor.h"
#include "core/scalar_type.h"
#include "optim/isa.h"

namespace castor {

/// Computes the mean of `count` gradients of `numel` elements each, which lie one behind the other
/// from `parts` on. They are summed in that order in fp32, divided by `count`, and rounded once. So
/// for a `count` that is a power of two, an fp32 mean has the bits of gradients of losses divided
/// by `count`, added one after the other.
///
/// `mean` may be `parts`, and overlaps nothing else. All are of `type` and need only its alignment.
/// `executor` may be null: the calling thread then does all the work.
void average(Executor* executor, void* mean, const void* parts, std::size_t count,
             std::size_t numel, ScalarType type);

/// Adds up parts that come in several calls, in the order of the calls, for a later average_last().
/// `sums`, of `numel` elements, become the sums of all parts so far; with `begun` false they begin
/// with the parts of this call.
void add_up(Executor* executor, float* sums, bool begun, const void* parts, std::size_t count,
            std::size_t numel, ScalarType type);
/// Makes the last of these calls and computes the mean. `total` is the number of parts in all
/// calls. With nullptr for `sums` it is the first call as well.
void average_last(Executor* executor, void* mean, const float* sums, const void* parts,
                  std::size_t count, std::size_t total, std::size_t numel, ScalarType type);

/// Same as average(), but without the division: computes the sum, rounded once as torch rounds
/// (bf16: ties to even), so that it has the bits of a sum on a device.
void sum(void* total, const void* parts, std::size_t count, std::size_t numel, ScalarType type);

namespace detail {
/// Rounding of a value in the middle of two bf16 values. fp16 rounds to the even one.
enum class Ties : std::uint8_t { kAway, kToEven };

/// Work of average, add_up, average_last and sum on the parts.
struct PartSums {
  const void* parts = nullptr;
  std::size_t count = 0;
  std::size_t numel = 0;
  ScalarType type{};
  const float* before = nullptr;  ///< sums to which the parts are added; nullptr: none
  float* sums = nullptr;          ///< destination of the sums; nullptr: the result goes into `mean`
  void* mean = nullptr;           ///< the sums divided by `divisor`, rounded
  float divisor = 1.0F;           ///< divisor of the mean
  Ties ties = Ties::kAway;        ///< rounding of a bf16 mean
};

/// Does the work on a given one of supported_isas().
void average(Executor* executor, const PartSums& work, Isa isa);
}  // namespace detail

}  // namespace castor
