#pragma once

#include <cstddef>

#include "core/ids.h"

namespace castor {

/// Seam that follows payloads which are not always in memory: torch storages of parameters or
/// gradients in csrc/torch, fakes in tests. Whoever brings a payload into memory says where it is.
/// Thread-safe.
class AddressFollower {
 public:
  virtual ~AddressFollower() = default;
  /// Points at the chunk's payload, which begins at `address`; nullptr: it is in no memory.
  virtual void point_at(ChunkId chunk, std::byte* address) const noexcept = 0;
};

}  // namespace castor
