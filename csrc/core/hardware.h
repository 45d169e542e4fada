#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/chunk_layout.h"
#include "core/overlap.h"

namespace castor {

/// Who moves bytes between device and host.
enum class CopyMode : std::uint8_t {
  kOverlapped,   ///< a copy engine, one queue a direction, beside the compute
  kSynchronous,  ///< the thread that computes: it waits until the copy is done
};

/// Whether computing and the host's updates have processors of their own.
enum class UpdateCores : std::uint8_t {
  kOwn,     ///< a GPU computes, the host updates
  kShared,  ///< the CPU device: what one takes the other lacks
};

/// What can be busy.
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

/// Sustained speeds, in bytes per second; all above 0, but for tiers that are not there.
struct Hardware {
  double h2d_bytes_per_second = 0.0;
  double d2h_bytes_per_second = 0.0;
  /// Of host memory, reads and writes together: what updates on the host and the links share.
  double dram_bytes_per_second = 0.0;
  /// Of the device's memory: what the update of a chunk that lives there is bound by.
  double device_memory_bytes_per_second = 0.0;
  /// Of NVMe, reads and writes together; 0: there is no such tier.
  double nvme_bytes_per_second = 0.0;
  CopyMode parameter_copies = CopyMode::kOverlapped;
  CopyMode gradient_copies = CopyMode::kOverlapped;
  UpdateCores update_cores = UpdateCores::kOwn;
  /// Of device memory, reserved for gradients on their way home (docs/design/0016).
  std::uint64_t gradient_window_bytes = 0;
};

/// What the optimizer keeps and moves for each trainable element (docs/design/0012).
struct OptimizerCost {
  /// Master or remainder, and moments; parameter and gradient are counted by the chunk's type.
  double state_bytes_per_element = 0.0;
  /// Read and written by an update, parameter and gradient included.
  double moved_bytes_per_element = 0.0;
  /// Read once before the updates, to know the gradient norm; 0 without clipping and checks.
  double norm_bytes_per_element = 0.0;
  /// Updates beside backward are not simulated.
  Overlap overlap = Overlap::kNone;
};

/// Throws InvalidArgument where a speed is not above 0, a cost negative or not finite, or the
/// overlap kBackward.
void check_hardware(const Hardware& hardware);
void check_optimizer_cost(const OptimizerCost& optimizer);

/// Elements that a chunk's payloads hold, alignment gaps included.
[[nodiscard]] inline std::size_t num_elements(const ChunkSpec& chunk) {
  return chunk.used_bytes / size_of(chunk.type);
}

/// Bytes that a chunk's payloads take: parameters and, where trainable, gradients and state.
[[nodiscard]] std::uint64_t payload_bytes(const ChunkSpec& chunk, const OptimizerCost& optimizer);
/// Of them the optimizer's state.
[[nodiscard]] std::uint64_t state_bytes_of(const ChunkSpec& chunk, const OptimizerCost& optimizer);

}  // namespace castor
