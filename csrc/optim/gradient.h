#pragma once

#include <cstddef>
#include <span>

#include "core/executor.h"
#include "core/scalar_type.h"
#include "optim/isa.h"

namespace castor {

/// Sizes that give the order of a sum of squares, the same on every processor. Lane l of a block
/// adds the squares of its elements l, l + kNormLanes, ... in that order. The lanes are added in
/// halves (8, 4, 2, 1 apart), the blocks from first to last.
inline constexpr std::size_t kNormBlock = 4096;
inline constexpr std::size_t kNormLanes = 16;

/// A tensor whose sum of squares a device computes; needs only its element's alignment.
struct NormSegment {
  const void* data = nullptr;
  std::size_t numel = 0;
  ScalarType type = ScalarType::kFloat32;
};

/// Copies a gradient and returns the sum of its squares, in double, from one pass over memory.
/// `dst` null or equal to `src` means no copy; otherwise they must not overlap. Both are of `type`
/// and need only its alignment.
///
/// The sum is exact but for double rounding, and its bits depend on the elements alone. They are
/// added in blocks of kNormBlock and, within a block, in kNormLanes lanes, whatever the instruction
/// set and the number of threads. An infinity or NaN among the elements makes the result infinite
/// or NaN; finite elements cannot overflow it. Subnormal fp32 and bf16 elements count as zero.
///
/// `executor` may be null: the calling thread then does all the work. Short gradients are never
/// worth a task and stay on the calling thread too.
[[nodiscard]] double copy_and_square_norm(Executor* executor, void* dst, const void* src,
                                          std::size_t numel, ScalarType type);

// The same sum of a gradient that is in pieces, each of which begins at a multiple of kNormLanes.

/// Computes the sums of blocks, which lie one behind the other from `src` on. Each has kNormBlock
/// elements, except the last. There are as many blocks as `sums` has entries.
void square_norms_of_blocks(Executor* executor, const void* src, std::size_t numel, ScalarType type,
                            std::span<double> sums);
/// Adds the squares of a piece's elements in one block to the block's lanes, behind those added
/// before.
void add_squares(std::span<double, kNormLanes> lanes, const void* src, std::size_t numel,
                 ScalarType type);
/// Returns the block's sum.
[[nodiscard]] double sum_of_lanes(std::span<const double, kNormLanes> lanes);

namespace detail {
/// Runs copy_and_square_norm on a given one of supported_isas().
[[nodiscard]] double copy_and_square_norm(Executor* executor, void* dst, const void* src,
                                          std::size_t numel, ScalarType type, Isa isa);
}  // namespace detail

}  // namespace castor
