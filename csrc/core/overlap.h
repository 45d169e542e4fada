#pragma once

#include <cstdint>

namespace castor {

/// When the optimizer's updates run beside other work (docs/design/0016). All give the same bits.
enum class Overlap : std::uint8_t {
  kNone,     ///< inside step()
  kForward,  ///< beside what follows step(); whatever needs a chunk waits for that chunk
  /// As kForward, and a chunk whose gradients are complete is updated while backward goes on. Exact
  /// only where nothing that step() learns decides over the update: no clipping, no skipping.
  kBackward,
};

}  // namespace castor
