#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/scalar_type.h"

namespace castor {

/// Choice of the adder of what ranks give: castor, in rank order, with the bits of one process; or
/// the backend of a process group (NCCL), in an order of its own.
enum class Reduction : std::uint8_t { kOrdered, kBackend };
/// Place where data-parallel ranks reduce gradients.
enum class ReducedOn : std::uint8_t { kHost, kDevice };

/// Seam to collectives between the ranks' devices, for gradients and weights of data-parallel
/// ranks. With Reduction::kOrdered a mean has the bits of castor::average() over the ranks, in
/// their order. With kBackend the order of additions is the backend's, and 16-bit gradients are
/// added in their own type, so bits depend on the number of ranks.
///
/// All ranks make the same calls in the same order, one at a time. Memory of the device that a call
/// takes has no work under way. A call returns when it is done on this rank, and throws Error where
/// another rank is lost.
class DeviceReduction {
 public:
  /// Memory that holds the values that a rank gives.
  enum class From : std::uint8_t { kHost, kDevice };

  virtual ~DeviceReduction() = default;

  /// Returns the bytes of the window for gradients of at most `largest` bytes at once.
  [[nodiscard]] virtual std::size_t window_bytes(std::size_t largest) const = 0;
  /// Takes the window, memory of the device that outlives all reductions. Called once, by a thread
  /// whose current stream orders the memory, before the first reduction.
  virtual void use_window(std::span<std::byte> window) = 0;
  /// Replaces values in memory of the device by their mean over the ranks.
  virtual void all_reduce_mean(std::span<std::byte> values, ScalarType type) = 0;
  /// Fills `all`, in memory of the device, with the shard of each rank. This rank's is there.
  virtual void all_gather(std::span<std::byte> all) = 0;
  /// Writes the ranks' mean of this rank's shard into `shard`, in memory of the host. It is the
  /// rank()-th of size() equal shards of `values`, which pass through the window.
  virtual void reduce_scatter_mean(std::span<const std::byte> values, From from,
                                   std::span<std::byte> shard, ScalarType type) = 0;
  /// Ends a reduction that is under way, and all later ones: this rank leaves the others. From any
  /// thread.
  virtual void leave() noexcept = 0;
};

/// Returns where gradients of streamed chunks are reduced, given the ranks' reduction on devices or
/// nullptr.
[[nodiscard]] inline ReducedOn reduced_on(const DeviceReduction* reduction) noexcept {
  return reduction == nullptr ? ReducedOn::kHost : ReducedOn::kDevice;
}

}  // namespace castor
