#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"

namespace castor {

/// Place of a chunk's payloads during and between steps.
enum class Placement : std::uint8_t {
  kStream,  ///< host storage, host optimizer; device slot on demand, may be evicted
  kKeep,    ///< host storage, host optimizer; device slot from first use to the end of the step
  kDevice,  ///< everything on the device, always
};

/// Placement that the user asks for. `kStatic` follows the two fractions, as Gemini's static policy
/// does.
enum class PlacementPolicy : std::uint8_t { kAuto, kCpu, kCuda, kStatic };

struct PlacementOptions {
  PlacementPolicy policy = PlacementPolicy::kAuto;
  /// kStatic: fraction of trainable bytes whose optimizer state and gradients live on the host.
  double offload_optim_frac = 0.0;
  /// kStatic: fraction of parameter bytes that stream; needs offload_optim_frac == 1.
  double offload_param_frac = 0.0;
};

/// Returns one placement per chunk, in chunk order: the first chunks of the model are the ones that
/// leave. auto and cpu stream every chunk; they differ in what the planner keeps between uses.
/// Throws InvalidArgument when a fraction is outside [0, 1] or the two contradict each other.
[[nodiscard]] std::vector<Placement> place_chunks(const ChunkLayout& layout,
                                                  const PlacementOptions& options);

/// Payloads that lie on NVMe, one entry for each chunk; an empty vector: none.
struct StoredPayloads {
  /// Optimizer states, which the chunk's update streams.
  std::vector<bool> states;
  /// Parameters and gradients, which are read for every copy to the device, for the norm and for
  /// the update.
  std::vector<bool> weights;
  /// Number of chunks whose parameters are read ahead of the device (ParamStore::max_leases).
  std::size_t max_leases = 0;
};

/// Chooses the chunks whose optimizer states go to NVMe; `state_bytes` has one entry per chunk. The
/// states that stay come to at most `host_bytes`, less the window through which states on NVMe are
/// worked on. At least `fraction` of all state bytes, in [0, 1], goes to NVMe. The chosen chunks
/// are spread evenly, so that while one is read another one can be updated. Chunks without state
/// stay.
[[nodiscard]] std::vector<bool> choose_stored(std::span<const std::size_t> state_bytes,
                                              std::size_t host_bytes, std::size_t window_bytes = 0,
                                              double fraction = 0.0);

/// Bytes that chunks need on the host, one entry for each.
struct HostNeeds {
  std::vector<std::size_t> weights;  ///< parameters and gradients
  std::vector<std::size_t> states;
  std::size_t weights_slot = 0;  ///< bytes of a window buffer for weights on NVMe
  std::size_t states_slot = 0;   ///< bytes of a window buffer for states on NVMe
};

/// Numbers of window buffers: the most that there is use for, and the fewest that work.
struct WindowLimits {
  std::size_t most_for_weights = 8;
  std::size_t fewest_for_weights = 5;
  std::size_t most_for_states = 3;
};

struct StoredWeightsChoice {
  std::vector<bool> stored;      ///< per chunk
  std::size_t window_slots = 0;  ///< most window buffers; 0: nothing is stored
};

/// Chooses the chunks whose parameters and gradients go to NVMe. None go as long as moving all
/// states there leaves enough of `host_bytes` for the rest, even if only with one window buffer for
/// the states. The chosen chunks are spread evenly.
[[nodiscard]] StoredWeightsChoice choose_stored_weights(const HostNeeds& needs,
                                                        std::size_t host_bytes,
                                                        const WindowLimits& limits = {});

}  // namespace castor
