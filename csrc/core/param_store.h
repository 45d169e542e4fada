#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/ids.h"

namespace castor {

enum class ParamAccess : std::uint8_t { kRead, kWrite };

/// Lease that keeps the parameters of a chunk in host memory while it lives.
class ParamLease {
 public:
  virtual ~ParamLease() = default;
  /// Returns the address of the parameters, valid once wait() has returned.
  [[nodiscard]] virtual std::byte* data() const noexcept = 0;
  /// Returns when the parameters are in memory, and may be changed if `access` says so. From any
  /// thread. Rethrows the failure of what brings them.
  virtual void wait(ParamAccess access) = 0;
};

/// Store of parameters that are not in host memory all the time: on NVMe, or sharded over several
/// ranks. Seam: StoredWeights in csrc/torch, fakes in tests. Thread-safe.
class ParamStore {
 public:
  virtual ~ParamStore() = default;
  /// Returns whether the chunk's parameters are in this store.
  [[nodiscard]] virtual bool stored(ChunkId chunk) const noexcept = 0;
  /// Returns whether the chunk's gradients are in this store.
  [[nodiscard]] virtual bool gradients_stored(ChunkId chunk) const noexcept {
    return stored(chunk);
  }
  /// Starts to bring the chunk's parameters into memory, and returns the lease on them.
  [[nodiscard]] virtual std::unique_ptr<ParamLease> lease(ChunkId chunk) = 0;
  /// Returns the number of chunks that a caller may hold at once while every other caller still
  /// gets the chunk that it needs.
  [[nodiscard]] virtual std::size_t max_leases() const noexcept = 0;
  /// Announces the chunks that will be held soon, in this order, in place of those announced
  /// before. Starts to bring in those that there is room for.
  virtual void announce(std::span<const ChunkId> chunks) = 0;
  /// Notes that the chunk's parameters are bound to a device slot from now on.
  virtual void moved_out(ChunkId chunk) noexcept = 0;
};

}  // namespace castor
