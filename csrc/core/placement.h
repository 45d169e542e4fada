#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"

namespace castor {

/// Where a chunk's payloads live between and during steps.
enum class Placement : std::uint8_t {
  kStream,  ///< home and optimizer on the host; device slot on demand, may be evicted
  kKeep,    ///< home and optimizer on the host; device slot from first use to the end of the step
  kDevice,  ///< everything on the device, always
};

/// How the user asks for placement. `kStatic` follows the two fractions, as Gemini's static policy.
enum class PlacementPolicy : std::uint8_t { kAuto, kCpu, kCuda, kStatic };

struct PlacementOptions {
  PlacementPolicy policy = PlacementPolicy::kAuto;
  /// kStatic: fraction of trainable bytes whose optimizer state and gradients live on the host.
  double offload_optim_frac = 0.0;
  /// kStatic: fraction of parameter bytes that stream; needs offload_optim_frac == 1.
  double offload_param_frac = 0.0;
};

/// One placement per chunk, in chunk order: the first chunks of the model are the ones that leave.
/// auto and cpu stream every chunk; they differ in what the planner keeps between uses.
/// Throws InvalidArgument when a fraction is outside [0, 1] or the two contradict each other.
[[nodiscard]] std::vector<Placement> place_chunks(const ChunkLayout& layout,
                                                  const PlacementOptions& options);

/// Which payloads lie on NVMe, one entry for each chunk; an empty vector: of none.
struct StoredPayloads {
  /// Optimizer state: the chunk's update streams it.
  std::vector<bool> states;
  /// Parameters and gradients: read for every copy to the device, for the norm and for the update.
  std::vector<bool> weights;
  /// As HomeStore::max_held: this many chunks' parameters are read ahead of the device.
  std::size_t max_held = 0;
};

/// Which chunks' optimizer states go to NVMe, so that the others' `state_bytes` (one entry per
/// chunk) come to at most `host_bytes`, less the window through which states on NVMe are worked on;
/// and `fraction` of all of them at least, in [0, 1]. They are spread evenly over the chunks, so
/// that while one is read another one can be updated. Chunks without state stay.
[[nodiscard]] std::vector<bool> choose_stored(std::span<const std::size_t> state_bytes,
                                              std::size_t host_bytes, std::size_t window_bytes = 0,
                                              double fraction = 0.0);

/// What chunks need on the host, one entry for each.
struct HostNeeds {
  std::vector<std::size_t> weights;  ///< parameters and gradients
  std::vector<std::size_t> states;
  std::size_t weights_slot = 0;  ///< of the windows on NVMe
  std::size_t states_slot = 0;
};

/// The windows' slots: as many as there is use for, and the fewest that work.
struct WindowLimits {
  std::size_t most_for_weights = 8;
  std::size_t fewest_for_weights = 5;
  std::size_t most_for_states = 3;
};

struct StoredWeightsChoice {
  std::vector<bool> stored;      ///< per chunk
  std::size_t window_slots = 0;  ///< at most; 0: nothing is stored
};

/// Which chunks' parameters and gradients go to NVMe: none as long as moving all states there is
/// enough for the rest to fit `host_bytes`, were it with one slot for the states. What goes is
/// spread evenly over the chunks.
[[nodiscard]] StoredWeightsChoice choose_stored_weights(const HostNeeds& needs,
                                                        std::size_t host_bytes,
                                                        const WindowLimits& limits = {});

}  // namespace castor
