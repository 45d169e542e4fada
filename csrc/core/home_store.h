#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/ids.h"

namespace castor {

enum class HomeAccess : std::uint8_t { kRead, kWrite };

/// Keeps the parameters of a chunk in host memory while it lives.
class HomeHold {
 public:
  virtual ~HomeHold() = default;
  /// Where they are, once wait() has returned.
  [[nodiscard]] virtual std::byte* data() const noexcept = 0;
  /// Returns when they are there, and may be changed if `access` says so. From any thread. Rethrows
  /// the failure of what brings them.
  virtual void wait(HomeAccess access) = 0;
};

/// Homes that are not in memory all the time: parameters on NVMe, or in parts on several ranks.
/// Seam: StoredWeights in csrc/torch, fakes in tests. Thread-safe.
class HomeStore {
 public:
  virtual ~HomeStore() = default;
  /// Whether the chunk's parameters have such a home ...
  [[nodiscard]] virtual bool stored(ChunkId chunk) const noexcept = 0;
  /// ... and its gradients too.
  [[nodiscard]] virtual bool gradients_stored(ChunkId chunk) const noexcept {
    return stored(chunk);
  }
  /// Starts to bring the chunk's parameters into memory.
  [[nodiscard]] virtual std::unique_ptr<HomeHold> hold(ChunkId chunk) = 0;
  /// How many chunks one may hold and still be sure that whoever else needs one gets it.
  [[nodiscard]] virtual std::size_t max_held() const noexcept = 0;
  /// These will be held soon, in this order: starts to bring in what there is room for.
  virtual void announce(std::span<const ChunkId> chunks) = 0;
  /// The chunk's parameters are bound to a device slot from now on.
  virtual void moved_out(ChunkId chunk) noexcept = 0;
};

}  // namespace castor
