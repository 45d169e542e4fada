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

/// Pass in which a module is under way.
enum class Pass : std::uint8_t { kForward, kBackward };

/// Account of the modules under way and of their pins: the modules whose forward runs, nested, and
/// the one whose backward began last. Owned by the runtime, and by a dry run. Not thread-safe.
class ModuleFrames {
 public:
  using Released = std::function<void(ModuleId, Pass)>;

  /// Makes an empty account. Calls `released` for each module that is under way no more, before its
  /// pins go.
  explicit ModuleFrames(Released released = {}) : released_(std::move(released)) {}

  /// Prepares a forward: ends the backward under way and, before the root module's forward,
  /// releases everything that an interrupted pass left.
  void begin_forward(ModuleId module);
  /// Enters a module whose forward has begun. `acquire(std::vector<Pin>*)` appends the module's
  /// pins. Where it throws, these pins are gone and the module is not under way.
  template <typename Acquire>
  void enter_forward(ModuleId module, Acquire&& acquire) {
    const std::size_t first = acquired(&forward_pins_, acquire);
    forwards_.push_back({module, first});
  }
  /// Releases the module and the modules entered after it. Requires that the module is entered.
  void exit_forward(ModuleId module);
  /// Same as enter_forward, but for a backward. Requires that no backward is under way.
  template <typename Acquire>
  void enter_backward(ModuleId module, Acquire&& acquire) {
    static_cast<void>(acquired(&backward_pins_, acquire));
    backward_ = module;
  }
  void end_backward();
  void release_all();

  [[nodiscard]] bool entered(ModuleId module) const noexcept;
  /// Returns the innermost module whose forward is under way; nullopt where there is none.
  [[nodiscard]] std::optional<ModuleId> innermost() const noexcept {
    return forwards_.empty() ? std::nullopt : std::optional(forwards_.back().module);
  }
  [[nodiscard]] std::optional<ModuleId> backward() const noexcept { return backward_; }
  [[nodiscard]] bool backward_pins() const noexcept { return !backward_pins_.empty(); }
  /// Returns whether no forward is under way.
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
