#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace castor {

/// Format of the optimizer state of a parameter (docs/design/0012). Every format but kFp32 is for
/// bf16 parameters, which are themselves the upper 16 bits of the fp32 master.
enum class StateFormat : std::uint8_t {
  kFp32,       ///< fp32 master (16-bit parameters), fp32 moments
  kSplit,      ///< 16-bit remainder of the master, fp32 moments: kFp32's weights, bit for bit
  kSplitBf16,  ///< remainder; bf16 moments, rounded stochastically
  kSplitInt8,  ///< remainder; 8-bit moments in blocks with a scale each, rounded stochastically
};

/// Number of elements of a parameter that share one pair of scales in kSplitInt8. Blocks count from
/// element 0 of the chunk (of the parameter, where it stands alone). So parameters begin at
/// multiples of this and only their ends have shorter blocks.
inline constexpr std::size_t kMomentBlock = 256;

/// Scales of one block: the knees of its two maps (optim/block_moments.h), powers of two. A scale
/// is NaN where a moment of the block is not finite: all of the block's moments then read as NaN.
struct MomentScales {
  float exp_avg = 0.0f;
  float exp_avg_sq = 0.0f;
};

/// Bytes of state for each element, beside the parameter and its gradient. The scales of kSplitInt8
/// come to sizeof(MomentScales) for each begun block.
struct StateBytes {
  std::size_t master = 0;      ///< fp32 master
  std::size_t remainder = 0;   ///< low half of the master
  std::size_t exp_avg = 0;     ///< float, bf16 bits, or 8-bit codes
  std::size_t exp_avg_sq = 0;  ///< same types as exp_avg
};

/// Returns the bytes for 16-bit parameters; fp32 ones are their own master.
[[nodiscard]] constexpr StateBytes state_bytes(StateFormat format) noexcept {
  switch (format) {
    case StateFormat::kFp32: return {.master = 4, .exp_avg = 4, .exp_avg_sq = 4};
    case StateFormat::kSplit: return {.remainder = 2, .exp_avg = 4, .exp_avg_sq = 4};
    case StateFormat::kSplitBf16: return {.remainder = 2, .exp_avg = 2, .exp_avg_sq = 2};
    case StateFormat::kSplitInt8: return {.remainder = 2, .exp_avg = 1, .exp_avg_sq = 1};
  }
  return {};
}

/// Returns the number of begun blocks of `numel` elements.
[[nodiscard]] constexpr std::size_t num_moment_blocks(std::size_t numel) noexcept {
  return (numel + kMomentBlock - 1) / kMomentBlock;
}

[[nodiscard]] constexpr std::string_view to_string(StateFormat format) noexcept {
  switch (format) {
    case StateFormat::kFp32: return "fp32";
    case StateFormat::kSplit: return "split";
    case StateFormat::kSplitBf16: return "split_bf16";
    case StateFormat::kSplitInt8: return "split_int8";
  }
  return "unknown";
}

}  // namespace castor
