#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/chunk_layout.h"
#include "core/overlap.h"

namespace castor {

/// Way in which bytes move between device and host.
enum class CopyMode : std::uint8_t {
  kOverlapped,   ///< by a copy engine, one queue a direction, beside the compute
  kSynchronous,  ///< by the thread that computes, which waits until the copy is done
};

/// Cores that the updates on the host run on.
enum class UpdateCores : std::uint8_t {
  kOwn,     ///< cores of their own: a GPU computes, the host updates
  kShared,  ///< cores of the CPU device, which computing and updates share
};

/// Resource that can be busy.
enum class Resource : std::uint8_t { kCompute, kH2d, kD2h, kDram, kNvme };

inline constexpr std::size_t kNumResources = 5;

[[nodiscard]] constexpr std::string_view to_string(Resource resource) noexcept {
  switch (resource) {
    case Resource::kCompute: return "compute";
    case Resource::kH2d: return "h2d";
    case Resource::kD2h: return "d2h";
    case Resource::kDram: return "dram";
    case Resource::kNvme: return "nvme";
  }
  return "unknown";
}

/// Sustained speeds, in bytes per second. All are above 0, except those of tiers that are not
/// there.
struct Hardware {
  double h2d_bytes_per_second = 0.0;
  double d2h_bytes_per_second = 0.0;
  /// Speed of host memory, reads and writes together; updates on the host and the links share it.
  double dram_bytes_per_second = 0.0;
  /// Speed of the device's memory, which bounds the update of a chunk that is resident there.
  double device_memory_bytes_per_second = 0.0;
  /// Speed of NVMe, reads and writes together; 0: there is no such tier.
  double nvme_bytes_per_second = 0.0;
  /// Speed of the host's updates alone, which cores may bound below that of DRAM; 0: DRAM's.
  double update_bytes_per_second = 0.0;
  CopyMode parameter_copies = CopyMode::kOverlapped;
  CopyMode gradient_copies = CopyMode::kOverlapped;
  UpdateCores update_cores = UpdateCores::kOwn;
  /// Bytes of device memory reserved for gradients on their way to the host (docs/design/0016),
  /// for updates on the device (docs/design/0061), and for gradients that gather there
  /// (docs/design/0067).
  std::uint64_t reserved_device_bytes = 0;
  /// Number of ranks that reduce gradients of streamed chunks on their devices, each of which sends
  /// its shard of the mean to the host (docs/design/0067); 1: gradients go there in full.
  std::uint64_t gathering_ranks = 1;
};

/// Bytes that the optimizer stores and moves for each trainable element (docs/design/0012).
struct OptimizerCost {
  /// Bytes of master or remainder, and of moments. Parameter and gradient are counted by the
  /// chunk's type.
  double state_bytes_per_element = 0.0;
  /// Bytes read and written by an update, parameter and gradient included.
  double moved_bytes_per_element = 0.0;
  /// Bytes of moved_bytes_per_element that are written.
  double written_bytes_per_element = 0.0;
  /// Share, in [0, 1], of the elements in host storage that the device updates beside the host:
  /// they cross the link, and come back (docs/design/0061).
  double device_update_fraction = 0.0;
  /// Bytes read once before the updates, for the gradient norm; 0 without clipping and checks.
  double norm_bytes_per_element = 0.0;
  /// Overlap of the updates with other work. Updates beside backward are not simulated.
  Overlap overlap = Overlap::kNone;
};

/// Throws InvalidArgument where a member is not above 0; NVMe's speed and that of updates may be 0.
void check_hardware(const Hardware& hardware);
/// Throws InvalidArgument where a cost is negative or not finite, where a share is not in [0, 1],
/// or where the overlap is kBackward.
void check_optimizer_cost(const OptimizerCost& optimizer);

/// Returns the elements that a chunk's payloads hold, alignment gaps included.
[[nodiscard]] inline std::size_t num_elements(const ChunkSpec& chunk) {
  return chunk.used_bytes / size_of(chunk.type);
}

/// Returns the bytes that a chunk's payloads take: parameters and, where trainable, gradients and
/// state.
[[nodiscard]] std::uint64_t payload_bytes(const ChunkSpec& chunk, const OptimizerCost& optimizer);
/// Returns the bytes of a chunk's optimizer state.
[[nodiscard]] std::uint64_t state_bytes_of(const ChunkSpec& chunk, const OptimizerCost& optimizer);

}  // namespace castor
