#include "optim/sgd_rule.h"

#include "optim/element_update.h"
#include "optim/rule_checks.h"
#include "optim/sgd_element.h"

namespace castor {
namespace {

constexpr StateSpec kStates[] = {{.name = "momentum_buffer", .plural = "momentum buffers"}};

constexpr std::string_view kOptions[] = {"lr",           "momentum", "dampening",
                                         "weight_decay", "nesterov", "maximize"};

struct SgdOptions {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, maximize;

  explicit SgdOptions(const RuleOptions& given)
      : lr(given[0]),
        momentum(given[1]),
        dampening(given[2]),
        weight_decay(given[3]),
        nesterov(given[4] != 0.0),
        maximize(given[5] != 0.0) {}
};

void check(const SgdOptions& options, Momentum kept) {
  const detail::OptionCheck check("SGD");
  check.not_negative(options.lr, "lr");
  check.not_negative(options.momentum, "momentum");
  check.finite(options.dampening, "dampening");
  check.not_negative(options.weight_decay, "weight_decay");
  if (options.nesterov && (options.momentum == 0.0 || options.dampening != 0.0)) {
    throw InvalidArgument("SGD: nesterov needs a momentum above 0 and no dampening, got momentum " +
                          std::to_string(options.momentum) + " and dampening " +
                          std::to_string(options.dampening));
  }
  if (kept == Momentum::kNone && options.momentum != 0.0) {
    throw InvalidArgument(
        "SGD: momentum is " + std::to_string(options.momentum) +
        ", and every group's was 0 when the model was boosted, so that no momentum_buffer has a "
        "place: give a group its momentum before booster.boost");
  }
}

}  // namespace

template <Momentum momentum>
std::span<const StateSpec> SgdRule<momentum>::states() const noexcept {
  return std::span(kStates).first(momentum == Momentum::kNone ? 0 : 1);
}

template <Momentum momentum>
std::span<const std::string_view> SgdRule<momentum>::option_names() const noexcept {
  return kOptions;
}

template <Momentum momentum>
RuleCoefficients SgdRule<momentum>::coefficients(const RuleOptions& given, std::int64_t step,
                                                 double grad_scale) const {
  const SgdOptions options(given);
  check(options, momentum);
  detail::OptionCheck("SGD").step(step, grad_scale);
  return RuleCoefficients(SgdElement<momentum == Momentum::kBuffer>{
      .grad_scale = static_cast<float>(options.maximize ? -grad_scale : grad_scale),
      .minus_lr = static_cast<float>(-options.lr),
      .weight_decay = static_cast<float>(options.weight_decay),
      .momentum = static_cast<float>(options.momentum),
      .one_minus_dampening = static_cast<float>(1.0 - options.dampening),
      .decays = options.weight_decay != 0.0,
      .accelerates = options.momentum != 0.0,
      .first = step == 1,
      .nesterov = options.nesterov});
}

template <Momentum momentum>
void SgdRule<momentum>::update(Executor& executor, std::span<const UpdateSegment> segments) const {
  update_on(executor, segments, best_isa());
}

template <Momentum momentum>
void SgdRule<momentum>::update_on(Executor& executor, std::span<const UpdateSegment> segments,
                                  Isa isa) const {
  detail::update_elements<SgdElement<momentum == Momentum::kBuffer>>(*this, executor, segments,
                                                                     isa);
}

template <Momentum momentum>
bool SgdRule<momentum>::steps_states(const RuleOptions& options) const noexcept {
  return SgdOptions(options).momentum != 0.0;
}

template class SgdRule<Momentum::kNone>;
template class SgdRule<Momentum::kBuffer>;

}  // namespace castor
