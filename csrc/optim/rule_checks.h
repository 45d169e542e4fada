#pragma once

// Internal to csrc/optim: checks of a group's options.

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/error.h"

namespace castor::detail {

/// Checks of the options of `rule`, which is named as users call it. Each throws InvalidArgument.
class OptionCheck {
 public:
  explicit OptionCheck(std::string_view rule) : rule_(rule) {}

  void not_negative(double value, std::string_view name) const {
    if (!(value >= 0.0 && std::isfinite(value)))
      refuse(name, " must be finite and at least 0, got ", value);
  }
  void finite(double value, std::string_view name) const {
    if (!std::isfinite(value))
      refuse(name, " must be finite, got ", value);
  }
  void beta(double value, std::string_view name) const {
    if (!(value >= 0.0 && value < 1.0))
      refuse(name, " must be in [0, 1), got ", value);
  }
  /// Checks the step and the gradient scale of an update.
  void step(std::int64_t step, double grad_scale) const {
    if (step < 1)
      throw InvalidArgument(rule_ + ": step counts from 1, got " + std::to_string(step));
    if (!std::isfinite(grad_scale)) {
      throw InvalidArgument(rule_ +
                            ": grad_scale must be finite: skip the step when the gradients "
                            "overflowed");
    }
  }

 private:
  [[noreturn]] void refuse(std::string_view name, std::string_view what, double value) const {
    throw InvalidArgument(rule_ + ": " + std::string(name) + std::string(what) +
                          std::to_string(value));
  }

  std::string rule_;
};

}  // namespace castor::detail
