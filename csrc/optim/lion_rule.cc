#include "optim/lion_rule.h"

#include "optim/element_update.h"
#include "optim/lion_element.h"
#include "optim/rule_checks.h"

namespace castor {
namespace {

constexpr StateSpec kStates[] = {{.name = "exp_avg", .plural = "exp_avg"}};
constexpr std::string_view kOptions[] = {"lr", "beta1", "beta2", "weight_decay"};

}  // namespace

std::span<const StateSpec> LionRule::states() const noexcept { return kStates; }

std::span<const std::string_view> LionRule::option_names() const noexcept { return kOptions; }

RuleCoefficients LionRule::coefficients(const RuleOptions& options, std::int64_t step,
                                        double grad_scale) const {
  const double lr = options[0], beta1 = options[1], beta2 = options[2], weight_decay = options[3];
  const detail::OptionCheck check("Lion");
  check.not_negative(lr, "lr");
  check.beta(beta1, "beta1");
  check.beta(beta2, "beta2");
  check.not_negative(weight_decay, "weight_decay");
  check.step(step, grad_scale);
  return RuleCoefficients(LionElement{.grad_scale = static_cast<float>(grad_scale),
                                      .minus_lr = static_cast<float>(-lr),
                                      .decay_factor = static_cast<float>(1.0 - lr * weight_decay),
                                      .beta1 = static_cast<float>(beta1),
                                      .one_minus_beta1 = static_cast<float>(1.0 - beta1),
                                      .beta2 = static_cast<float>(beta2),
                                      .one_minus_beta2 = static_cast<float>(1.0 - beta2)});
}

void LionRule::update(Executor& executor, std::span<const UpdateSegment> segments) const {
  update_on(executor, segments, best_isa());
}

void LionRule::update_on(Executor& executor, std::span<const UpdateSegment> segments,
                         Isa isa) const {
  detail::update_elements<LionElement>(*this, executor, segments, isa);
}

}  // namespace castor
