#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/executor.h"
#include "core/scalar_type.h"
#include "optim/isa.h"
#include "optim/state_format.h"
#include "optim/stochastic.h"

namespace castor {

/// Way that weight decay enters the update: AdamW decays the weights, Adam adds the decay to the
/// gradient.
enum class WeightDecayMode : std::uint8_t { kDecoupled, kL2 };

/// Hyper-parameters as the user gives them (Loshchilov & Hutter 2019, algorithm 2).
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  WeightDecayMode mode = WeightDecayMode::kDecoupled;
  bool maximize = false;  ///< the update follows the negated gradient

  [[nodiscard]] bool operator==(const AdamOptions&) const = default;
};

/// Coefficients of one parameter's update: its options at its step. Everything that does not depend
/// on the element is computed once, in double precision, and rounded once.
struct AdamCoefficients {
  /// Computes the coefficients. `step` counts from 1. `grad_scale` multiplies each gradient first
  /// (clip coefficient / loss scale). Throws InvalidArgument for a step below 1, a beta outside [0,
  /// 1), a negative lr, eps or weight decay, or anything not finite.
  AdamCoefficients(const AdamOptions& options, std::int64_t step, double grad_scale);

  float grad_scale;
  float one_minus_beta1;
  float lerp_weight;  ///< 1 - beta1, or -beta1 where the lerp starts from the gradient
  float beta2;
  float one_minus_beta2;
  float step_size;                      ///< lr / (1 - beta1^step)
  float inverse_bias_correction2_sqrt;  ///< 1 / sqrt(1 - beta2^step)
  float eps;
  float decay_factor;  ///< 1 - lr * weight_decay, or 1 for kL2
  float l2_factor;     ///< weight_decay for kL2 unless it is subnormal, otherwise 0
};

/// A contiguous run of elements of one parameter. Pointers need only their element's alignment.
///
/// - Format kFp32, 16-bit types: `master` is the fp32 weight, `param` its rounding, and the two are
///   kept together. Where param is not the rounding of master, somebody has written the parameter
///   since the last update; master becomes that value before the update. The rounding to bf16 is to
///   nearest with ties away from zero, that to fp16 with ties to even (optim/rounding.h says why).
/// - Format kFp32, type kFloat32: master is the parameter itself and `param` must be null.
/// - Other formats, type kBFloat16: the master is `param` and `remainder` together, so that a
///   written parameter takes effect by itself (docs/design/0012 gives the details). In kSplitBf16
///   and kSplitInt8 the moments are rounded stochastically, by `rounding` and the element's index.
///   In kSplitInt8 a segment begins with a block, and only the parameter's last segment ends inside
///   one.
struct AdamSegment {
  float* master = nullptr;     ///< kFp32: read and written
  void* exp_avg = nullptr;     ///< read and written; element size by state_bytes()
  void* exp_avg_sq = nullptr;  ///< read and written
  const void* grad = nullptr;  ///< elements of `type`, read
  void* param = nullptr;       ///< elements of `type`, read and written
  ScalarType type = ScalarType::kFloat32;
  std::size_t numel = 0;
  AdamCoefficients coefficients;
  StateFormat format = StateFormat::kFp32;
  std::int16_t* remainder = nullptr;  ///< other formats than kFp32: read and written
  MomentScales* scales = nullptr;     ///< kSplitInt8: of each begun block, read and written
  RoundingKey rounding;               ///< kSplitBf16, kSplitInt8
  std::uint64_t first_element = 0;    ///< index in the parameter of the segment's first element
};

/// Applies one Adam step to each segment, in tasks on `executor`; no two arrays may overlap. The
/// formula is that of torch.optim.AdamW / Adam (not amsgrad) in fp32:
///   g = grad * grad_scale;  kL2: g += weight_decay * w;  kDecoupled: w *= 1 - lr * weight_decay
///   m = lerp(m, g, 1 - beta1);  v = v * beta2 + (1 - beta2) * g * g
///   w -= step_size * m / (sqrt(v) * inverse_bias_correction2_sqrt + eps)
/// The bits do not depend on how segments are cut, on the number of threads or on the instruction
/// set (for a NaN, only that it is one). Subnormals count as zero on x86-64. Throws
/// InvalidArgument, before anything is written, for missing or superfluous pointers, a format that
/// the type does not have, and a kSplitInt8 segment that begins inside a block.
void adam_update(Executor& executor, std::span<const AdamSegment> segments);

/// Returns the instruction set that adam_update uses here: "avx512", "avx2" or "baseline".
[[nodiscard]] std::string_view adam_isa() noexcept;

namespace detail {
/// Applies adam_update on a given one of supported_isas().
void adam_update(Executor& executor, std::span<const AdamSegment> segments, Isa isa);
}  // namespace detail

}  // namespace castor
