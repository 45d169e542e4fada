#pragma once

#include <cstddef>
#include <cstdint>

#include "core/executor.h"
#include "optim/state_format.h"

namespace castor {

// Conversions of arrays between the state formats and fp32, which every format can be read as and
// made from. Arrays must not overlap; pointers need only their element's alignment. `executor` may
// be null: the calling thread then does all the work.

/// Writes the low half of each master into `remainder`; with master_to_param() for the other half,
/// exact.
void split_masters(Executor* executor, std::int16_t* remainder, const float* master,
                   std::size_t numel);

/// Joins param (bf16 bits) and remainder into the master that the next update will see. The master
/// of a zero is zero.
void join_masters(Executor* executor, float* master, const std::uint16_t* param,
                  const std::int16_t* remainder, std::size_t numel);

/// Sets a remainder to 0 where `before` and `after` (bf16 bits) differ, so that the master is
/// exactly the value that was written. Meant for an owner that has a parameter both as it was and
/// as user code wrote it.
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

/// Reads the moments as fp32, exactly.
void load_moments(Executor* executor, const MomentArrays& from, float* exp_avg, float* exp_avg_sq);

/// Writes the moments, rounded to nearest. Values from load_moments come back bit for bit, if the
/// scales still are those they were loaded with. A block's old scales are kept where its values
/// could have been read with them, and made anew otherwise (zeros ask for new ones). Throws
/// InvalidArgument for a negative exp_avg_sq, before anything is written.
void store_moments(Executor* executor, const MomentArrays& to, const float* exp_avg,
                   const float* exp_avg_sq);

}  // namespace castor
