#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/adam_state.h"
#include "optim/test_support.h"
#include "optim/update_rule.h"

namespace castor::testing {

/// An update rule with the options of a group, a type of parameters and a state format.
struct ElementKind {
  std::string_view name;  ///< name of the test
  std::string_view rule;
  RuleOptions options;
  ScalarType type;
  StateFormat format;
};

/// Every rule that updates one element after another, with its options on and off, in every type
/// and format that exists.
inline std::vector<ElementKind> element_kinds() {
  struct Group {
    std::string_view name, rule;
    RuleOptions options;
  };
  // lr, momentum, dampening, weight_decay, nesterov, maximize; Lion: lr, betas, weight_decay.
  static constexpr Group kGroups[] = {
      {"sgd", "sgd", {0.1}},
      {"sgd_decay", "sgd", {0.1, 0, 0, 0.03, 0, 1}},
      {"without_momentum", "sgd_momentum", {0.1, 0, 0, 0.03}},
      {"momentum", "sgd_momentum", {0.1, 0.9}},
      {"dampening", "sgd_momentum", {0.1, 0.7, 0.3, 0.01}},
      {"nesterov", "sgd_momentum", {0.1, 0.9, 0, 0.01, 1, 1}},
      {"lion", "lion", {1e-3, 0.9, 0.99, 0.1}},
  };
  static constexpr AdamKind kTypes[] = {{ScalarType::kFloat32, StateFormat::kFp32},
                                        {ScalarType::kBFloat16, StateFormat::kFp32},
                                        {ScalarType::kFloat16, StateFormat::kFp32},
                                        {ScalarType::kBFloat16, StateFormat::kSplit}};
  std::vector<ElementKind> kinds;
  for (const Group& group : kGroups) {
    for (const AdamKind& type : kTypes)
      kinds.push_back({group.name, group.rule, group.options, type.type, type.format});
  }
  return kinds;
}

inline std::string element_kind_name(const ::testing::TestParamInfo<ElementKind>& kind) {
  return std::string(kind.param.name) + "_" + std::string(to_string(kind.param.type)) + "_" +
         std::string(to_string(kind.param.format));
}

/// A parameter with its gradient and the state of a rule, in one buffer, as AdamState.
class ElementHeld {
 public:
  /// Arrays begin `skew` elements after a 256-byte boundary.
  ElementHeld(const ElementKind& kind, std::size_t numel, std::size_t skew, unsigned seed)
      : rule_(make_update_rule(kind.rule, kind.format)),
        options_(kind.options),
        type_(kind.type),
        numel_(numel),
        own_(kind.type == ScalarType::kFloat32),
        split_(kind.format == StateFormat::kSplit) {
    param_ = place(size_of(type_), skew);
    grad_ = place(size_of(type_), 3 * skew);
    master_ = place(own_ || split_ ? 0 : 4, skew);
    remainder_ = place(split_ ? 2 : 0, 5 * skew);
    state_ = place(rule_->states().empty() ? 0 : 4, 0);
    bytes_.resize(end_);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel_; ++i) {
      set_weight(i, normal(random));
      set_state(i, 0.1f * normal(random));
      if (split_)
        write(remainder_ + 2 * i, static_cast<std::int16_t>(random()));
    }
    set_grads(seed + 1);
  }

  [[nodiscard]] std::size_t numel() const { return numel_; }
  [[nodiscard]] std::vector<std::byte>& bytes() { return bytes_; }
  [[nodiscard]] const UpdateRule& rule() const { return *rule_; }

  [[nodiscard]] UpdateSegment segment(std::byte* base, std::int64_t step) const {
    const auto at = [base](std::size_t offset) { return static_cast<void*>(base + offset); };
    UpdateSegment segment{
        .param = at(param_),
        .grad = at(grad_),
        .master = own_ || split_ ? nullptr : static_cast<float*>(at(master_)),
        .remainder = split_ ? static_cast<std::int16_t*>(at(remainder_)) : nullptr,
        .type = type_,
        .numel = numel_,
        .coefficients = rule_->coefficients(options_, step, 0.37)};
    if (!rule_->states().empty())
      segment.states[0] = at(state_);
    return segment;
  }

  void update_on_cpu(std::int64_t step) {
    InlineExecutor executor;
    const UpdateSegment segment = this->segment(bytes_.data(), step);
    rule_->update(executor, {&segment, 1});
  }

  void set_weight(std::size_t i, float value) {
    set(param_, i, value);
    if (!own_ && !split_)
      write(master_ + 4 * i, value);
  }
  void set_param_bits(std::size_t i, std::uint16_t bits) { write(param_ + 2 * i, bits); }
  [[nodiscard]] std::uint16_t param_bits(std::size_t i) const {
    return read<std::uint16_t>(param_ + 2 * i);
  }
  void set_grad(std::size_t i, float value) { set(grad_, i, value); }
  void set_state(std::size_t i, float value) {
    if (!rule_->states().empty())
      write(state_ + 4 * i, value);
  }
  [[nodiscard]] float state(std::size_t i) const { return read<float>(state_ + 4 * i); }
  void set_grads(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel_; ++i)
      set_grad(i, normal(random));
  }

  /// "" if both hold the same bits, else the first that differ. Any two NaN are the same, and the
  /// remainder of a NaN is not compared.
  [[nodiscard]] std::string difference(const ElementHeld& other) const {
    for (std::size_t i = 0; i < numel_; ++i) {
      std::string where;
      const auto floats_differ = [&](std::size_t offset) {
        return read<std::uint32_t>(offset) != other.read<std::uint32_t>(offset) &&
               !(std::isnan(read<float>(offset)) && std::isnan(other.read<float>(offset)));
      };
      if (own_) {
        if (floats_differ(param_ + 4 * i))
          where = "param";
      } else {
        const bool nan = std::isnan(reference_load(param_bits(i), type_));
        if (param_bits(i) != other.param_bits(i) &&
            !(nan && std::isnan(reference_load(other.param_bits(i), type_))))
          where = "param";
        if (split_ && !nan &&
            read<std::uint16_t>(remainder_ + 2 * i) !=
                other.read<std::uint16_t>(remainder_ + 2 * i))
          where = "remainder";
        if (!split_ && floats_differ(master_ + 4 * i))
          where = "master";
      }
      if (!rule_->states().empty() && floats_differ(state_ + 4 * i))
        where = "state";
      if (!where.empty())
        return where + " of element " + std::to_string(i);
    }
    return "";
  }

 private:
  std::size_t place(std::size_t element_bytes, std::size_t skew) {
    const std::size_t at = (end_ + 255) / 256 * 256 + skew * element_bytes;
    end_ = at + numel_ * element_bytes;
    return at;
  }
  void set(std::size_t at, std::size_t i, float value) {
    if (own_) {
      write(at + 4 * i, value);
    } else {
      write(at + 2 * i, reference_round(value, type_));
    }
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

  std::shared_ptr<const UpdateRule> rule_;
  RuleOptions options_;
  ScalarType type_;
  std::size_t numel_;
  bool own_;
  bool split_;
  std::size_t end_ = 0;
  std::size_t param_, grad_, master_, remainder_, state_;
  std::vector<std::byte> bytes_;
};

/// A parameter with every combination of special weight, state and gradient.
inline ElementHeld special_elements(const ElementKind& kind) {
  constexpr std::size_t kCount = std::size(kSpecialValues);
  ElementHeld held(kind, kCount * kCount * kCount, 1, 5);
  for (std::size_t i = 0; i < held.numel(); ++i) {
    held.set_weight(i, kSpecialValues[i % kCount]);
    held.set_grad(i, kSpecialValues[i / kCount % kCount]);
    held.set_state(i, kSpecialValues[i / kCount / kCount]);
  }
  return held;
}

}  // namespace castor::testing
