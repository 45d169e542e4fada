#pragma once

// Internal to csrc/optim and the CUDA kernels.

#include <string>

#include "core/error.h"
#include "optim/adam.h"

namespace castor::detail {

/// Throws InvalidArgument for what adam_update() says it refuses.
inline void check_segment(const AdamSegment& segment) {
  if (segment.numel == 0)
    return;
  const auto require = [](bool condition, const std::string& message) {
    if (!condition)
      throw InvalidArgument(message);
  };
  const std::string what = "Adam segment of " + std::to_string(segment.numel) + " " +
                           std::string(to_string(segment.type)) + " elements in format " +
                           std::string(to_string(segment.format));
  require(segment.exp_avg != nullptr && segment.exp_avg_sq != nullptr && segment.grad != nullptr,
          what + " lacks its moments or gradient");
  const bool has_param = segment.param != nullptr;
  require(has_param == (segment.type != ScalarType::kFloat32),
          what + (has_param ? " has a param beside its master: for fp32 the master is the parameter"
                            : " lacks its param"));
  const bool split = segment.format != StateFormat::kFp32;
  require(!split || segment.type == ScalarType::kBFloat16, what + ": only bfloat16 can be split");
  require((segment.master != nullptr) != split && (segment.remainder != nullptr) == split,
          what + (split ? " needs a remainder and no master" : " needs a master and no remainder"));
  const bool in_blocks = segment.format == StateFormat::kSplitInt8;
  require((segment.scales != nullptr) == in_blocks,
          what + (in_blocks ? " lacks its scales" : " has scales, which this format does not use"));
  require(!in_blocks || segment.first_element % kMomentBlock == 0,
          what + " begins at element " + std::to_string(segment.first_element) +
              ", inside a block of " + std::to_string(kMomentBlock));
}

}  // namespace castor::detail
