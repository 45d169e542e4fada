#pragma once

#include "core/ids.h"

namespace castor {

/// Updates of the optimizer that run beside the caller. Until a chunk's update is over, its host
/// storage may neither be read nor written. Seam: UpdateQueue in csrc/parallel, fakes in tests.
/// Thread-safe.
class PendingUpdates {
 public:
  virtual ~PendingUpdates() = default;
  [[nodiscard]] virtual bool pending(ChunkId chunk) const noexcept = 0;
  /// Returns when the chunk's update is over; rethrows what stopped it.
  virtual void wait(ChunkId chunk) = 0;
};

}  // namespace castor
