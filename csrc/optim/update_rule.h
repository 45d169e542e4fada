#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>

#include "core/executor.h"
#include "core/scalar_type.h"
#include "optim/state_format.h"
#include "optim/stochastic.h"

namespace castor {

/// Type of a state's elements.
enum class StateType : std::uint8_t { kFloat32, kBFloat16, kUInt8 };

[[nodiscard]] constexpr std::size_t size_of(StateType type) noexcept {
  return type == StateType::kFloat32 ? 4 : type == StateType::kBFloat16 ? 2 : 1;
}

/// An array that a rule keeps of each parameter, besides the fp32 master. It begins as zeros.
struct StateSpec {
  std::string_view name;    ///< name of the state in torch.optim: "exp_avg"
  std::string_view plural;  ///< name in messages: "scales of the moments"
  StateType type = StateType::kFloat32;
  /// Elements in a block. 1: the state has the parameter's shape. Otherwise each begun block of so
  /// many elements has `width` values of its own: shape (blocks, width).
  std::size_t block = 1;
  std::size_t width = 1;

  /// Returns the bytes of the state for the parameter's first `numel` elements.
  [[nodiscard]] constexpr std::size_t bytes(std::size_t numel) const noexcept {
    return (numel + block - 1) / block * width * size_of(type);
  }
};

inline constexpr std::size_t kMaxRuleStates = 4;
inline constexpr std::size_t kMaxRuleOptions = 8;

/// A parameter group's options, in the order of UpdateRule::option_names().
using RuleOptions = std::array<double, kMaxRuleOptions>;

/// Coefficients that a rule makes of options and step: a struct of its own, which fits into kBytes
/// and can be copied as bytes.
class RuleCoefficients {
 public:
  static constexpr std::size_t kBytes = 64;

  template <typename T>
  explicit RuleCoefficients(const T& value) noexcept {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kBytes);
    std::memcpy(bytes_, &value, sizeof(T));
  }
  /// Returns the T that this was made from; it must have been made from a T.
  template <typename T>
  [[nodiscard]] T as() const noexcept {
    std::array<std::byte, sizeof(T)> bytes;
    std::memcpy(bytes.data(), bytes_, sizeof(T));
    return std::bit_cast<T>(bytes);
  }

 private:
  alignas(8) std::byte bytes_[kBytes] = {};
};

/// A contiguous run of elements of one parameter, and the addresses of its arrays.
struct UpdateSegment {
  void* param = nullptr;                       ///< elements of `type`, read and written
  const void* grad = nullptr;                  ///< elements of `type`, read
  float* master = nullptr;                     ///< fp32 masters of 16-bit types in kFp32
  std::int16_t* remainder = nullptr;           ///< low halves of masters, in the other formats
  std::array<void*, kMaxRuleStates> states{};  ///< in the order of UpdateRule::states()
  ScalarType type = ScalarType::kFloat32;
  std::size_t numel = 0;
  std::uint64_t first_element = 0;  ///< index of the first element in the parameter
  RuleCoefficients coefficients;
  RoundingKey rounding;
};

/// Update rule of an optimizer: the states that it keeps, the options that a group has, and the
/// update of a run of elements on the host. A rule does not know where arrays are and when it runs;
/// a device finds its kernel by the rule's name (csrc/cuda/update_kernels.h). A rule is registered
/// in update_rules.cc. Immutable, so safe to use from any thread.
class UpdateRule {
 public:
  static constexpr std::size_t kWholeParameter = ~std::size_t{0};

  explicit UpdateRule(StateFormat format) noexcept : format_(format) {}
  virtual ~UpdateRule() = default;
  UpdateRule(const UpdateRule&) = delete;
  UpdateRule& operator=(const UpdateRule&) = delete;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
  /// Returns the states, at most kMaxRuleStates.
  [[nodiscard]] virtual std::span<const StateSpec> states() const noexcept = 0;
  /// Returns the names of the options, at most kMaxRuleOptions.
  [[nodiscard]] virtual std::span<const std::string_view> option_names() const noexcept = 0;
  /// Returns the number of elements that are updated together, counted from the parameter's first:
  /// 1, the elements of a block, or kWholeParameter (a matrix). Segments begin at multiples of it.
  [[nodiscard]] virtual std::size_t granule() const noexcept = 0;
  /// Computes the coefficients. `step` counts from 1; `grad_scale` multiplies each gradient first.
  /// Throws InvalidArgument for options out of range and anything not finite.
  [[nodiscard]] virtual RuleCoefficients coefficients(const RuleOptions& options, std::int64_t step,
                                                      double grad_scale) const = 0;
  /// Applies one step to each segment, in tasks on `executor`; no two arrays may overlap. The bits
  /// do not depend on how segments are cut, on the number of threads or on the instruction set.
  virtual void update(Executor& executor, std::span<const UpdateSegment> segments) const = 0;
  /// Returns whether an update with these options takes a step of the states. If not, the states
  /// stay as they are, and the update does not count where steps are counted.
  [[nodiscard]] virtual bool steps_states(const RuleOptions& /*options*/) const noexcept {
    return true;
  }

  /// Returns the format in which the states, and the masters of 16-bit parameters, are kept.
  [[nodiscard]] StateFormat format() const noexcept { return format_; }
  /// Returns whether parameter and remainder together are the bits of masters.
  [[nodiscard]] bool splits_masters() const noexcept { return format_ != StateFormat::kFp32; }

 private:
  const StateFormat format_;
};

/// Makes one of the registered rules. Throws InvalidArgument for an unknown name, or a format that
/// the rule does not have.
[[nodiscard]] std::unique_ptr<UpdateRule> make_update_rule(std::string_view name,
                                                           StateFormat format);
/// Returns the formats in which a rule can keep its states. Throws InvalidArgument for an unknown
/// name.
[[nodiscard]] std::span<const StateFormat> formats_of_rule(std::string_view name);

/// Checks the options of all groups before a step changes anything. Throws InvalidArgument, as
/// coefficients() does at every step, with the position of the group whose options are wrong.
void check_options(const UpdateRule& rule, std::span<const RuleOptions> groups);

}  // namespace castor
