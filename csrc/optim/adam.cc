#include "optim/adam.h"

#include <cmath>
#include <limits>
#include <string>

#include "core/error.h"
#include "optim/adam_check.h"
#include "optim/adam_element.h"
#include "optim/adam_split.h"
#include "optim/dispatch.h"
#include "optim/rounding.h"
#include "optim/rule_checks.h"
#include "optim/segment_pieces.h"

namespace castor {
namespace {

template <ScalarType type, WeightDecayMode mode>
struct UpdateLoop {
  const AdamSegment& segment;
  std::size_t begin;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    using Codec = ScalarCodec<type>;
    using Storage = typename Codec::Storage;
    const AdamCoefficients c = segment.coefficients;
    run(segment.master + begin, static_cast<float*>(segment.exp_avg) + begin,
        static_cast<float*>(segment.exp_avg_sq) + begin,
        static_cast<const Storage*>(segment.grad) + begin,
        type == ScalarType::kFloat32 ? nullptr : static_cast<Storage*>(segment.param) + begin,
        count, c);
  }

  template <typename Storage>
  [[gnu::always_inline]] static inline void run(float* __restrict master, float* __restrict exp_avg,
                                                float* __restrict exp_avg_sq,
                                                const Storage* __restrict grad,
                                                [[maybe_unused]] Storage* __restrict param,
                                                std::size_t count, AdamCoefficients c) {
    using Codec = ScalarCodec<type>;
    for (std::size_t i = 0; i < count; ++i) {
      float weight = master[i];
      if constexpr (type != ScalarType::kFloat32) {
        const Storage seen = param[i];
        weight = detail::blend(seen == Codec::round(weight), weight, Codec::load(seen));
      }
      const AdamElement updated =
          adam_element<mode>({weight, exp_avg[i], exp_avg_sq[i]}, Codec::load(grad[i]), c);
      master[i] = updated.weight;
      exp_avg[i] = updated.exp_avg;
      exp_avg_sq[i] = updated.exp_avg_sq;
      if constexpr (type != ScalarType::kFloat32) {
        param[i] = Codec::round(updated.weight);
      }
    }
  }
};

template <ScalarType type>
void update(Isa isa, const AdamSegment& segment, std::size_t begin, std::size_t count) {
  if (segment.coefficients.l2_factor != 0.0f) {
    detail::run_on(isa, UpdateLoop<type, WeightDecayMode::kL2>{segment, begin, count});
  } else {
    detail::run_on(isa, UpdateLoop<type, WeightDecayMode::kDecoupled>{segment, begin, count});
  }
}

void update(Isa isa, const AdamSegment& segment, std::size_t begin, std::size_t count) {
  if (segment.format != StateFormat::kFp32)
    return detail::update_split(isa, segment, begin, count);
  switch (segment.type) {
    case ScalarType::kFloat32: return update<ScalarType::kFloat32>(isa, segment, begin, count);
    case ScalarType::kBFloat16: return update<ScalarType::kBFloat16>(isa, segment, begin, count);
    case ScalarType::kFloat16: return update<ScalarType::kFloat16>(isa, segment, begin, count);
    case ScalarType::kUInt8: throw_no_arithmetic(segment.type);
  }
}

}  // namespace

AdamCoefficients::AdamCoefficients(const AdamOptions& options, std::int64_t step,
                                   double grad_scale_value) {
  const detail::OptionCheck check("Adam");
  check.beta(options.beta1, "beta1");
  check.beta(options.beta2, "beta2");
  check.not_negative(options.lr, "lr");
  check.not_negative(options.eps, "eps");
  check.not_negative(options.weight_decay, "weight_decay");
  check.step(step, grad_scale_value);

  const auto exponent = static_cast<double>(step);
  const bool decoupled = options.mode == WeightDecayMode::kDecoupled;
  grad_scale = static_cast<float>(options.maximize ? -grad_scale_value : grad_scale_value);
  one_minus_beta1 = static_cast<float>(1.0 - options.beta1);
  lerp_weight = one_minus_beta1 < 0.5f ? one_minus_beta1 : -static_cast<float>(options.beta1);
  beta2 = static_cast<float>(options.beta2);
  one_minus_beta2 = static_cast<float>(1.0 - options.beta2);
  step_size = static_cast<float>(options.lr / (1.0 - std::pow(options.beta1, exponent)));
  inverse_bias_correction2_sqrt =
      static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(options.beta2, exponent)));
  eps = static_cast<float>(options.eps);
  decay_factor = decoupled ? static_cast<float>(1.0 - options.lr * options.weight_decay) : 1.0f;
  // The loops take subnormals as zero: so does the choice between them, in any thread's mode.
  constexpr double kSmallest = std::numeric_limits<float>::min();
  const bool has_l2 = !decoupled && options.weight_decay >= kSmallest;
  l2_factor = has_l2 ? static_cast<float>(options.weight_decay) : 0.0f;
}

void detail::adam_update(Executor& executor, std::span<const AdamSegment> segments, Isa isa) {
  for (const AdamSegment& segment : segments)
    detail::check_segment(segment);
  detail::for_each_piece(executor, segments,
                         [isa](const AdamSegment& segment, std::size_t begin, std::size_t count) {
                           update(isa, segment, begin, count);
                         });
}

void adam_update(Executor& executor, std::span<const AdamSegment> segments) {
  detail::adam_update(executor, segments, best_isa());
}

std::string_view adam_isa() noexcept { return to_string(best_isa()); }

}  // namespace castor
