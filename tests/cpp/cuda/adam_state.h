#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "optim/adam.h"
#include "optim/adam_reference.h"
#include "optim/test_support.h"

namespace castor::testing {

/// One parameter with its optimizer state in one buffer, so that it can be copied to a device in
/// one piece: segment(base) gives pointers from wherever the buffer lies.
class AdamState {
 public:
  /// Arrays begin `skew` elements after a 256-byte boundary.
  AdamState(std::size_t numel, ScalarType type, StateFormat format, std::size_t skew, unsigned seed)
      : numel_(numel), type_(type), format_(format) {
    const StateBytes sizes = state_bytes(format);
    const bool split = format != StateFormat::kFp32;
    master_ = place(split ? 0 : 4, skew);
    param_ = place(is_fp32() ? 0 : 2, skew);
    grad_ = place(size_of(type), 3 * skew);
    exp_avg_ = place(sizes.exp_avg, 0);
    exp_avg_sq_ = place(sizes.exp_avg_sq, skew);
    remainder_ = place(split ? 2 : 0, 5 * skew);
    scales_ = (end_ + 255) / 256 * 256;
    if (format == StateFormat::kSplitInt8)
      end_ = scales_ + num_moment_blocks(numel) * sizeof(MomentScales);
    bytes_.resize(end_);
    fill(seed);
  }

  [[nodiscard]] std::size_t numel() const { return numel_; }
  [[nodiscard]] std::vector<std::byte>& bytes() { return bytes_; }

  [[nodiscard]] AdamSegment segment(std::byte* base, const AdamCoefficients& coefficients,
                                    std::int64_t step) const {
    const bool split = format_ != StateFormat::kFp32;
    const auto at = [base](std::size_t offset) { return static_cast<void*>(base + offset); };
    return {.master = split ? nullptr : static_cast<float*>(at(master_)),
            .exp_avg = at(exp_avg_),
            .exp_avg_sq = at(exp_avg_sq_),
            .grad = at(grad_),
            .param = is_fp32() ? nullptr : at(param_),
            .type = type_,
            .numel = numel_,
            .coefficients = coefficients,
            .format = format_,
            .remainder = split ? static_cast<std::int16_t*>(at(remainder_)) : nullptr,
            .scales = format_ == StateFormat::kSplitInt8 ? static_cast<MomentScales*>(at(scales_))
                                                         : nullptr,
            .rounding = RoundingKey(99, 3, step),
            .first_element = kFirstElement};
  }

  /// In its own memory.
  [[nodiscard]] AdamSegment segment(const AdamCoefficients& coefficients, std::int64_t step) {
    return segment(bytes_.data(), coefficients, step);
  }

  template <typename T>
  [[nodiscard]] T read(std::size_t offset) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof(T));
    return value;
  }
  template <typename T>
  void write(std::size_t offset, T value) {
    std::memcpy(bytes_.data() + offset, &value, sizeof(T));
  }

  void set_weight(std::size_t i, float value) {
    if (format_ == StateFormat::kFp32)
      write(master_ + 4 * i, value);
    if (!is_fp32())
      write(param_ + 2 * i, reference_round(value, type_));
  }
  void set_param_bits(std::size_t i, std::uint16_t bits) { write(param_ + 2 * i, bits); }
  [[nodiscard]] std::uint16_t param_bits(std::size_t i) const {
    return read<std::uint16_t>(param_ + 2 * i);
  }
  void set_grad(std::size_t i, float value) {
    if (is_fp32()) {
      write(grad_ + 4 * i, value);
    } else {
      write(grad_ + 2 * i, reference_round(value, type_));
    }
  }
  /// Formats with fp32 moments only.
  void set_moments(std::size_t i, float exp_avg, float exp_avg_sq) {
    write(exp_avg_ + 4 * i, exp_avg);
    write(exp_avg_sq_ + 4 * i, exp_avg_sq);
  }
  [[nodiscard]] float exp_avg(std::size_t i) const { return read<float>(exp_avg_ + 4 * i); }

  void set_grads(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel_; ++i)
      set_grad(i, 0.01f * normal(random));
  }

  /// "" if both hold the same bits, else the first that differ. Any two NaN are the same, and what
  /// only has a meaning beside a number (the remainder of a NaN, codes under a NaN scale) is not
  /// compared beside a NaN.
  [[nodiscard]] std::string difference(const AdamState& other) const {
    for (std::size_t i = 0; i < numel_; ++i) {
      const bool nan = !is_fp32() && is_nan16(param_bits(i), type_);
      const std::size_t sizes = state_bytes(format_).exp_avg;
      std::string where;
      if (format_ == StateFormat::kFp32 && !same_float(other, master_ + 4 * i))
        where = "master";
      if (!is_fp32() && param_bits(i) != other.param_bits(i) &&
          !(nan && is_nan16(other.param_bits(i), type_)))
        where = "param";
      if (format_ != StateFormat::kFp32 && !nan && !same<std::uint16_t>(other, remainder_ + 2 * i))
        where = "remainder";
      for (const std::size_t moment : {exp_avg_, exp_avg_sq_}) {
        if (!same_moment(other, moment + sizes * i, i))
          where = moment == exp_avg_ ? "exp_avg" : "exp_avg_sq";
      }
      if (!where.empty())
        return where + " of element " + std::to_string(i);
    }
    return "";
  }

  static constexpr std::uint64_t kFirstElement = 3 * kMomentBlock;

 private:
  [[nodiscard]] bool is_fp32() const { return type_ == ScalarType::kFloat32; }

  std::size_t place(std::size_t element_bytes, std::size_t skew) {
    const std::size_t at = (end_ + 255) / 256 * 256 + skew * element_bytes;
    end_ = at + numel_ * element_bytes;
    return at;
  }

  void fill(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel_; ++i) {
      set_weight(i, normal(random));
      if (format_ == StateFormat::kFp32 || format_ == StateFormat::kSplit)
        set_moments(i, 0.1f * normal(random), std::fabs(0.01f * normal(random)));
      if (format_ != StateFormat::kFp32)
        write(remainder_ + 2 * i, static_cast<std::int16_t>(random()));
    }
    set_grads(seed + 1);
  }

  static bool is_nan16(std::uint16_t bits, ScalarType type) {
    return std::isnan(reference_load(bits, type));
  }
  template <typename T>
  [[nodiscard]] bool same(const AdamState& other, std::size_t offset) const {
    return read<T>(offset) == other.read<T>(offset);
  }
  [[nodiscard]] bool same_float(const AdamState& other, std::size_t offset) const {
    return same<std::uint32_t>(other, offset) ||
           (std::isnan(read<float>(offset)) && std::isnan(other.read<float>(offset)));
  }
  [[nodiscard]] bool same_moment(const AdamState& other, std::size_t offset, std::size_t i) const {
    switch (format_) {
      case StateFormat::kFp32:
      case StateFormat::kSplit: return same_float(other, offset);
      case StateFormat::kSplitBf16:
        return same<std::uint16_t>(other, offset) ||
               (is_nan16(read<std::uint16_t>(offset), ScalarType::kBFloat16) &&
                is_nan16(other.read<std::uint16_t>(offset), ScalarType::kBFloat16));
      case StateFormat::kSplitInt8: break;
    }
    const std::size_t scales = scales_ + i / kMomentBlock * sizeof(MomentScales);
    const std::size_t scale = offset < exp_avg_sq_ ? scales : scales + sizeof(float);
    return same_float(other, scale) &&
           (same<std::uint8_t>(other, offset) || std::isnan(read<float>(scale)));
  }

  std::size_t numel_;
  ScalarType type_;
  StateFormat format_;
  std::size_t end_ = 0;
  std::size_t master_, param_, grad_, exp_avg_, exp_avg_sq_, remainder_, scales_;
  std::vector<std::byte> bytes_;
};

/// Every combination of a type and a format that exists.
struct AdamKind {
  ScalarType type;
  StateFormat format;
};

inline constexpr AdamKind kAdamKinds[] = {
    {ScalarType::kFloat32, StateFormat::kFp32},
    {ScalarType::kBFloat16, StateFormat::kFp32},
    {ScalarType::kFloat16, StateFormat::kFp32},
    {ScalarType::kBFloat16, StateFormat::kSplit},
    {ScalarType::kBFloat16, StateFormat::kSplitBf16},
    {ScalarType::kBFloat16, StateFormat::kSplitInt8},
};

/// Numbers at which something special happens, for weights, gradients and moments.
inline constexpr float kSpecialValues[] = {
    0.0f,      -0.0f,           1.0f,        -1.0f,       0x1p-149f,
    0x1p-140f, -0x1p-127f,      0x1p-126f,   0x1.8p-126f, -0x1.fffffep-126f,
    0x1p-63f,  1e-8f,           3e-39f,      65504.0f,    65520.0f,
    3.3e38f,   0x1.fffffep127f, 1.00390625f, INFINITY,    -INFINITY,
    NAN};

/// A parameter with every combination of special weight, exp_avg and gradient, and a special
/// exp_avg_sq that is none but positive.
inline AdamState special_state(const AdamKind& kind) {
  constexpr std::size_t kCount = std::size(kSpecialValues);
  AdamState state(kCount * kCount * kCount, kind.type, kind.format, 1, 5);
  for (std::size_t i = 0; i < state.numel(); ++i) {
    state.set_weight(i, kSpecialValues[i % kCount]);
    state.set_grad(i, kSpecialValues[i / kCount % kCount]);
    if (kind.format == StateFormat::kFp32 || kind.format == StateFormat::kSplit) {
      const std::size_t other = (i / 7 + i) % kCount;
      state.set_moments(i, kSpecialValues[i / kCount / kCount], std::fabs(kSpecialValues[other]));
    }
  }
  return state;
}

inline std::string kind_name(const ::testing::TestParamInfo<AdamKind>& kind) {
  return std::string(to_string(kind.param.type)) + "_" + std::string(to_string(kind.param.format));
}

inline AdamOptions options_with(WeightDecayMode mode) {
  return {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .mode = mode};
}

/// One step by the CPU loop.
inline void update_on_cpu(AdamState& state, const AdamCoefficients& coefficients,
                          std::int64_t step) {
  InlineExecutor executor;
  const AdamSegment segment = state.segment(coefficients, step);
  adam_update(executor, {&segment, 1});
}

}  // namespace castor::testing
