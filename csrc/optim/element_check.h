#pragma once

// Internal to csrc/optim and the CUDA kernels.

#include <cstddef>
#include <span>
#include <string>

#include "core/error.h"
#include "optim/update_rule.h"

namespace castor::detail {

/// Returns why a rule that keeps `num_states` fp32 states of each element refuses a segment; empty
/// if it does not.
[[nodiscard]] inline std::string complaint_about(const UpdateSegment& segment, bool split,
                                                 std::size_t num_states) {
  if (segment.param == nullptr || segment.grad == nullptr)
    return " lacks its parameter or gradient";
  if (split && segment.type != ScalarType::kBFloat16)
    return ": only bfloat16 can be split";
  const bool needs_master = !split && segment.type != ScalarType::kFloat32;
  if ((segment.master != nullptr) != needs_master || (segment.remainder != nullptr) != split) {
    return split          ? " needs a remainder and no master"
           : needs_master ? " needs a master and no remainder"
                          : " needs neither master nor remainder";
  }
  for (std::size_t i = 0; i < kMaxRuleStates; ++i) {
    if ((segment.states[i] != nullptr) != (i < num_states))
      return i < num_states ? " lacks a state" : " has a state that the rule does not keep";
  }
  return {};
}

/// Throws InvalidArgument for a segment that the rule refuses, before any is updated.
inline void check_segments(const UpdateRule& rule, std::span<const UpdateSegment> segments) {
  for (const UpdateSegment& segment : segments) {
    const std::string complaint =
        segment.numel == 0 ? ""
                           : complaint_about(segment, rule.splits_masters(), rule.states().size());
    if (!complaint.empty()) {
      throw InvalidArgument("segment of " + std::to_string(segment.numel) + " " +
                            std::string(to_string(segment.type)) + " elements for the rule '" +
                            std::string(rule.name()) + "'" + complaint);
    }
  }
}

}  // namespace castor::detail
