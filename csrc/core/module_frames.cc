#include "core/module_frames.h"

#include <algorithm>
#include <cassert>

namespace castor {

void ModuleFrames::begin_forward(ModuleId module) {
  end_backward();
  while (module == kRootModule && !forwards_.empty()) {
    release_innermost();
  }
}

void ModuleFrames::exit_forward(ModuleId module) {
  assert(entered(module));
  while (forwards_.back().module != module) {
    release_innermost();
  }
  release_innermost();
}

void ModuleFrames::end_backward() {
  if (backward_) {
    if (released_) {
      released_(*backward_, Pass::kBackward);
    }
    backward_pins_.clear();
    backward_.reset();
  }
}

void ModuleFrames::release_all() { begin_forward(kRootModule); }

bool ModuleFrames::entered(ModuleId module) const noexcept {
  return std::any_of(forwards_.begin(), forwards_.end(),
                     [module](const Frame& frame) { return frame.module == module; });
}

void ModuleFrames::release_innermost() {
  if (released_) {
    released_(forwards_.back().module, Pass::kForward);
  }
  forward_pins_.resize(forwards_.back().first_pin);
  forwards_.pop_back();
}

}  // namespace castor
