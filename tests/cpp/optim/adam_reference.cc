#include "optim/adam_reference.h"

#include <cmath>
#include <limits>

namespace castor::testing {
namespace {

struct Format {
  int mantissa_bits;
  int min_exponent;  // of the smallest normal
  int max_exponent;
};

constexpr Format format_of(ScalarType type) {
  return type == ScalarType::kBFloat16 ? Format{7, -126, 127} : Format{10, -14, 15};
}

}  // namespace

std::uint16_t reference_round(float value, ScalarType type) {
  const Format format = format_of(type);
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = (2 * format.max_exponent + 1) << format.mantissa_bits;
  if (std::isnan(value))
    return static_cast<std::uint16_t>(sign | infinity | 1);
  if (std::isinf(value))
    return static_cast<std::uint16_t>(sign | infinity);
  const double magnitude = std::fabs(static_cast<double>(value));
  int exponent = magnitude == 0.0 ? format.min_exponent : std::ilogb(magnitude);
  if (exponent < format.min_exponent)
    exponent = format.min_exponent;
  const double steps = std::ldexp(magnitude, format.mantissa_bits - exponent);
  const double rounded = type == ScalarType::kBFloat16 ? std::round(steps) : std::nearbyint(steps);
  // The bits of (exponent, steps) count up from zero through subnormals, normals and infinity.
  const int bits =
      ((exponent - format.min_exponent) << format.mantissa_bits) + static_cast<int>(rounded);
  return static_cast<std::uint16_t>(sign | (bits < infinity ? bits : infinity));
}

float reference_load(std::uint16_t bits, ScalarType type) {
  const Format format = format_of(type);
  const int magnitude = bits & 0x7fff;
  const int exponent = magnitude >> format.mantissa_bits;
  const int mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
  double value = 0.0;
  if (exponent == 2 * format.max_exponent + 1) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << format.mantissa_bits),
                       exponent - 1 + format.min_exponent - format.mantissa_bits);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

ReferenceElement reference_adam(ReferenceElement old, float grad, const AdamOptions& options,
                                std::int64_t step, double grad_scale) {
  const auto t = static_cast<double>(step);
  const auto step_size = static_cast<float>(options.lr / (1.0 - std::pow(options.beta1, t)));
  const auto inverse_bias2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(options.beta2, t)));
  const auto lerp = static_cast<float>(1.0 - options.beta1);

  float g = grad * static_cast<float>(grad_scale);
  float w = old.weight;
  if (options.mode == WeightDecayMode::kDecoupled) {
    w *= static_cast<float>(1.0 - options.lr * options.weight_decay);
  } else if (options.weight_decay != 0.0) {
    g += static_cast<float>(options.weight_decay) * w;
  }
  float m = old.exp_avg;
  if (lerp < 0.5f) {
    m += lerp * (g - m);
  } else {
    m = g - (g - m) * static_cast<float>(options.beta1);
  }
  float v = old.exp_avg_sq * static_cast<float>(options.beta2);
  v += static_cast<float>(1.0 - options.beta2) * g * g;
  const float denominator = std::sqrt(v) * inverse_bias2 + static_cast<float>(options.eps);
  w -= step_size * m / denominator;
  return {w, m, v};
}

void DoubleAdam::step(double grad, const AdamOptions& options, std::int64_t step) {
  const auto t = static_cast<double>(step);
  if (options.mode == WeightDecayMode::kDecoupled) {
    weight -= options.lr * options.weight_decay * weight;
  } else {
    grad += options.weight_decay * weight;
  }
  exp_avg = options.beta1 * exp_avg + (1.0 - options.beta1) * grad;
  exp_avg_sq = options.beta2 * exp_avg_sq + (1.0 - options.beta2) * grad * grad;
  const double m_hat = exp_avg / (1.0 - std::pow(options.beta1, t));
  const double v_hat = exp_avg_sq / (1.0 - std::pow(options.beta2, t));
  weight -= options.lr * m_hat / (std::sqrt(v_hat) + options.eps);
}

}  // namespace castor::testing
