#include "optim/adam_rule.h"

namespace castor {
namespace {

constexpr StateSpec moment(std::string_view name, StateType type) {
  return {.name = name, .plural = name, .type = type};
}

template <StateType type>
constexpr StateSpec kMoments[] = {moment("exp_avg", type), moment("exp_avg_sq", type)};

constexpr StateSpec kBlockMoments[] = {moment("exp_avg", StateType::kUInt8),
                                       moment("exp_avg_sq", StateType::kUInt8),
                                       {.name = "scales",
                                        .plural = "scales of the moments",
                                        .type = StateType::kFloat32,
                                        .block = kMomentBlock,
                                        .width = 2}};
static_assert(kBlockMoments[2].bytes(1) == sizeof(MomentScales));

constexpr std::string_view kOptions[] = {"lr",           "beta1",     "beta2",   "eps",
                                         "weight_decay", "decoupled", "maximize"};

}  // namespace

std::span<const StateSpec> AdamRule::states() const noexcept {
  switch (format()) {
    case StateFormat::kFp32:
    case StateFormat::kSplit: return kMoments<StateType::kFloat32>;
    case StateFormat::kSplitBf16: return kMoments<StateType::kBFloat16>;
    case StateFormat::kSplitInt8: return kBlockMoments;
  }
  return {};
}

std::span<const std::string_view> AdamRule::option_names() const noexcept { return kOptions; }

RuleCoefficients AdamRule::coefficients(const RuleOptions& options, std::int64_t step,
                                        double grad_scale) const {
  const auto [lr, beta1, beta2, eps, weight_decay, decoupled, maximize, unused] = options;
  return RuleCoefficients(AdamCoefficients(
      {.lr = lr,
       .beta1 = beta1,
       .beta2 = beta2,
       .eps = eps,
       .weight_decay = weight_decay,
       .mode = decoupled != 0.0 ? WeightDecayMode::kDecoupled : WeightDecayMode::kL2,
       .maximize = maximize != 0.0},
      step, grad_scale));
}

void AdamRule::update(Executor& executor, std::span<const UpdateSegment> segments) const {
  adam_update(executor, adam_segments(segments, format()));
}

}  // namespace castor
