#pragma once

#include <cstddef>

namespace castor {

/// Seam to device memory that makes later passes faster and that no pass needs: a cache. It gives
/// way before a chunk leaves the device, and before an allocation fails.
class SpareMemory {
 public:
  virtual ~SpareMemory() = default;
  /// Frees device memory of at least `bytes`, or all that is not in use. Returns whether it freed
  /// any. Called by any thread that needs room, with the runtime's mutex held: it calls neither the
  /// runtime nor anything that allocates device memory.
  [[nodiscard]] virtual bool give_up(std::size_t bytes) noexcept = 0;
};

}  // namespace castor
