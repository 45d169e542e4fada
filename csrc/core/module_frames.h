#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "core/ids.h"
#include "core/mutex.h"
#include "core/residency.h"

namespace castor {

/// The first module, which encloses the others.
inline constexpr ModuleId kRootModule{0};

/// Which of its two passes a module is under way in.
enum class Pass : std::uint8_t { kForward, kBackward };

/// The modules under way and what they pin: those whose forward runs, nested, and the one whose
/// backward began last. Owned by the runtime, and by a dry run. Not thread-safe.
class ModuleFrames {
 public:
  using Released = std::function<void(ModuleId, Pass)>;

  /// `released` is told of each module that is under way no more, before its pins go.
  explicit ModuleFrames(Released released = {}) : released_(std::move(released)) {}

  /// A forward begins: the backward under way ends, and before the model's forward all that an
  /// interrupted pass left.
  void begin_forward(ModuleId module);
  /// Once it began. `acquire(std::vector<Pin>*)` appends what the module pins; where it throws, its
  /// pins are gone and the module is not under way.
  template <typename Acquire>
  void enter_forward(ModuleId module, Acquire&& acquire) {
    const std::size_t first = acquired(&forward_pins_, acquire);
    forwards_.push_back({module, first});
  }
  /// Releases the module and whatever it left entered. Requires that it is entered.
  void exit_forward(ModuleId module);
  /// As enter_forward. Requires that no backward is under way.
  template <typename Acquire>
  void enter_backward(ModuleId module, Acquire&& acquire) {
    static_cast<void>(acquired(&backward_pins_, acquire));
    backward_ = module;
  }
  void end_backward();
  void release_all();

  [[nodiscard]] bool entered(ModuleId module) const noexcept;
  /// Of the forwards under way; nullopt where there is none.
  [[nodiscard]] std::optional<ModuleId> innermost() const noexcept {
    return forwards_.empty() ? std::nullopt : std::optional(forwards_.back().module);
  }
  [[nodiscard]] std::optional<ModuleId> backward() const noexcept { return backward_; }
  [[nodiscard]] bool backward_pins() const noexcept { return !backward_pins_.empty(); }
  /// Whether no forward is under way.
  [[nodiscard]] bool no_forward() const noexcept { return forwards_.empty(); }

 private:
  struct Frame {
    ModuleId module;
    std::size_t first_pin;
  };

  template <typename Acquire>
  static std::size_t acquired(std::vector<Pin>* pins, Acquire&& acquire) CASTOR_NOT_ANALYZED {
    const std::size_t first = pins->size();
    try {
      acquire(pins);
    } catch (...) {
      pins->resize(first);
      throw;
    }
    return first;
  }
  void release_innermost();

  const Released released_;
  std::vector<Frame> forwards_;
  std::vector<Pin> forward_pins_;
  std::optional<ModuleId> backward_;
  std::vector<Pin> backward_pins_;
};

}  // namespace castor
