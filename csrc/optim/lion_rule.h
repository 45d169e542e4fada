#pragma once

#include <span>
#include <string_view>

#include "optim/isa.h"
#include "optim/update_rule.h"

namespace castor {

/// Lion (lion_element.h), with the bits of castor.optim.Lion's own step in fp32 on the CPU, except
/// that subnormals are taken as zero.
class LionRule final : public UpdateRule {
 public:
  static constexpr std::string_view kName = "lion";
  static constexpr StateFormat kFormats[] = {StateFormat::kFp32, StateFormat::kSplit};

  using UpdateRule::UpdateRule;
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  [[nodiscard]] std::span<const StateSpec> states() const noexcept override;
  [[nodiscard]] std::span<const std::string_view> option_names() const noexcept override;
  [[nodiscard]] std::size_t granule() const noexcept override { return 1; }
  [[nodiscard]] RuleCoefficients coefficients(const RuleOptions& options, std::int64_t step,
                                              double grad_scale) const override;
  void update(Executor& executor, std::span<const UpdateSegment> segments) const override;
  /// Updates the segments on one of supported_isas().
  void update_on(Executor& executor, std::span<const UpdateSegment> segments, Isa isa) const;
};

}  // namespace castor
