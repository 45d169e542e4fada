#pragma once

#include <cstdint>

namespace castor {

/// Overlap of the optimizer's updates with other work (docs/design/0016). All give the same bits.
enum class Overlap : std::uint8_t {
  kNone,     ///< inside step()
  kForward,  ///< beside what follows step(); whatever needs a chunk waits for that chunk
  /// Same as kForward, but a chunk whose gradients are complete is updated while backward goes on.
  /// Exact only where the update depends on nothing that step() learns: no clipping, no skipping.
  kBackward,
};

}  // namespace castor
