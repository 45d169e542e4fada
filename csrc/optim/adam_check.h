#pragma once

// Internal to csrc/optim and the CUDA kernels.

#include <string>

#include "core/error.h"
#include "optim/adam.h"

namespace castor::detail {

/// Returns why adam_update() refuses a segment; empty if it does not.
[[nodiscard]] inline std::string complaint_about(const AdamSegment& segment) {
  const bool has_param = segment.param != nullptr;
  const bool split = segment.format != StateFormat::kFp32;
  const bool in_blocks = segment.format == StateFormat::kSplitInt8;
  if (segment.exp_avg == nullptr || segment.exp_avg_sq == nullptr || segment.grad == nullptr)
    return " lacks its moments or gradient";
  if (has_param != (segment.type != ScalarType::kFloat32)) {
    return has_param ? " has a param beside its master: for fp32 the master is the parameter"
                     : " lacks its param";
  }
  if (split && segment.type != ScalarType::kBFloat16)
    return ": only bfloat16 can be split";
  if ((segment.master == nullptr) != split || (segment.remainder != nullptr) != split)
    return split ? " needs a remainder and no master" : " needs a master and no remainder";
  if ((segment.scales != nullptr) != in_blocks)
    return in_blocks ? " lacks its scales" : " has scales, which this format does not use";
  if (in_blocks && segment.first_element % kMomentBlock != 0) {
    return " begins at element " + std::to_string(segment.first_element) + ", inside a block of " +
           std::to_string(kMomentBlock);
  }
  return {};
}

/// Throws InvalidArgument for a segment that adam_update() refuses.
inline void check_segment(const AdamSegment& segment) {
  const std::string complaint = segment.numel == 0 ? "" : complaint_about(segment);
  if (!complaint.empty()) {
    throw InvalidArgument("Adam segment of " + std::to_string(segment.numel) + " " +
                          std::string(to_string(segment.type)) + " elements in format " +
                          std::string(to_string(segment.format)) + complaint);
  }
}

}  // namespace castor::detail
