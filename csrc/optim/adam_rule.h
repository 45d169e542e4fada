#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "optim/adam.h"
#include "optim/update_rule.h"

namespace castor {

/// Adam and AdamW (optim/adam.h) in every state format.
class AdamRule final : public UpdateRule {
 public:
  static constexpr std::string_view kName = "adam";
  static constexpr StateFormat kFormats[] = {StateFormat::kFp32, StateFormat::kSplit,
                                             StateFormat::kSplitBf16, StateFormat::kSplitInt8};

  using UpdateRule::UpdateRule;
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  [[nodiscard]] std::span<const StateSpec> states() const noexcept override;
  [[nodiscard]] std::span<const std::string_view> option_names() const noexcept override;
  [[nodiscard]] std::size_t granule() const noexcept override {
    return format() == StateFormat::kSplitInt8 ? kMomentBlock : 1;
  }
  [[nodiscard]] RuleCoefficients coefficients(const RuleOptions& options, std::int64_t step,
                                              double grad_scale) const override;
  void update(Executor& executor, std::span<const UpdateSegment> segments) const override;
};

/// Converts a rule's segments to those that Adam's functions and kernels take.
[[nodiscard]] inline std::vector<AdamSegment> adam_segments(std::span<const UpdateSegment> segments,
                                                            StateFormat format) {
  std::vector<AdamSegment> result;
  result.reserve(segments.size());
  for (const UpdateSegment& segment : segments) {
    const bool own_master = segment.type == ScalarType::kFloat32;
    result.push_back({.master = own_master ? static_cast<float*>(segment.param) : segment.master,
                      .exp_avg = segment.states[0],
                      .exp_avg_sq = segment.states[1],
                      .grad = segment.grad,
                      .param = own_master ? nullptr : segment.param,
                      .type = segment.type,
                      .numel = segment.numel,
                      .coefficients = segment.coefficients.as<AdamCoefficients>(),
                      .format = format,
                      .remainder = segment.remainder,
                      .scales = static_cast<MomentScales*>(segment.states[2]),
                      .rounding = segment.rounding,
                      .first_element = segment.first_element});
  }
  return result;
}

}  // namespace castor
