#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "optim/isa.h"
#include "optim/update_rule.h"

namespace castor {

/// State that SGD keeps of each parameter.
enum class Momentum : std::uint8_t {
  kNone,    ///< nothing: every group's momentum is 0
  kBuffer,  ///< momentum_buffer, fp32; a group without momentum leaves its own as it is
};

/// torch.optim.SGD (sgd_element.h), with the bits of torch's steps on the CPU, except that
/// subnormals are taken as zero.
template <Momentum momentum>
class SgdRule final : public UpdateRule {
 public:
  static constexpr std::string_view kName = momentum == Momentum::kNone ? "sgd" : "sgd_momentum";
  static constexpr StateFormat kFormats[] = {StateFormat::kFp32, StateFormat::kSplit};

  using UpdateRule::UpdateRule;
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  [[nodiscard]] std::span<const StateSpec> states() const noexcept override;
  [[nodiscard]] std::span<const std::string_view> option_names() const noexcept override;
  [[nodiscard]] std::size_t granule() const noexcept override { return 1; }
  /// Also throws InvalidArgument for a momentum where no buffer is kept.
  [[nodiscard]] RuleCoefficients coefficients(const RuleOptions& options, std::int64_t step,
                                              double grad_scale) const override;
  void update(Executor& executor, std::span<const UpdateSegment> segments) const override;
  /// Updates the segments on one of supported_isas().
  void update_on(Executor& executor, std::span<const UpdateSegment> segments, Isa isa) const;
  [[nodiscard]] bool steps_states(const RuleOptions& options) const noexcept override;
};

}  // namespace castor
