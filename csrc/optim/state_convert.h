#pragma once

#include <cstddef>
#include <cstdint>

#include "core/executor.h"
#include "optim/state_format.h"

namespace castor {

// Whole arrays between the state formats and fp32, which every format can be read as and made from.
// Arrays must not overlap; pointers need only their element's alignment. `executor` may be null:
// the calling thread does it all.

/// remainder = low half of each master; with master_to_param() for the other half, exact.
void split_masters(Executor* executor, std::int16_t* remainder, const float* master,
                   std::size_t numel);

/// master = param (bf16 bits) and remainder together, as the next update will see it: that of a
/// zero is zero.
void join_masters(Executor* executor, float* master, const std::uint16_t* param,
                  const std::int16_t* remainder, std::size_t numel);

/// For an owner that has a parameter both as it was and as user code wrote it (bf16 bits): where
/// the two differ, remainder becomes 0, so that the master is exactly what was written.
void forget_remainders(Executor* executor, std::int16_t* remainder, const std::uint16_t* before,
                       const std::uint16_t* after, std::size_t numel);

/// The moments of consecutive elements in a format, from the beginning of a block on.
struct MomentArrays {
  StateFormat format = StateFormat::kFp32;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  MomentScales* scales = nullptr;  ///< kSplitInt8 only, one for each begun block
  std::size_t numel = 0;
};

/// Exact.
void load_moments(Executor* executor, const MomentArrays& from, float* exp_avg, float* exp_avg_sq);

/// Rounds to nearest. What load_moments gave comes back bit for bit, if the scales still are those
/// it was loaded with: a block's old scales are kept where its values could have been read with
/// them, and made anew otherwise (zeros ask for new ones). Throws InvalidArgument for a negative
/// exp_avg_sq, before anything is written.
void store_moments(Executor* executor, const MomentArrays& to, const float* exp_avg,
                   const float* exp_avg_sq);

}  // namespace castor
