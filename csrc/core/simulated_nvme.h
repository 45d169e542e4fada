#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/hardware.h"
#include "core/placement.h"
#include "core/planner.h"
#include "core/residency.h"
#include "core/service_queue.h"

namespace castor {

/// NVMe in a simulated step: the payloads that lie there, those that have been read ahead, and the
/// times when transfers are over. Reads and writes share one queue. Times are seconds. `now` is the
/// time when the transfer could begin.
///
/// A payload is read each time somebody needs it: bytes that are still in a window count as gone.
class SimulatedNvme {
 public:
  /// Begins with nothing read. All arguments outlive this. Throws InvalidArgument where the entries
  /// are not those of the chunks, where something is stored and `bytes_per_second` is 0, or where
  /// weights are stored and `max_leases` is 0.
  SimulatedNvme(const ChunkLayout& layout, std::span<const Placement> placements,
                const OptimizerCost& optimizer, const StoredPayloads& stored,
                double bytes_per_second);

  [[nodiscard]] bool stores_states(ChunkId chunk) const { return has(stored_.states, chunk); }
  [[nodiscard]] bool stores_weights(ChunkId chunk) const { return has(stored_.weights, chunk); }
  /// Returns the bytes of the chunk's payloads that lie on NVMe.
  [[nodiscard]] std::uint64_t stored_bytes(ChunkId chunk) const;

  /// Returns when the chunk's parameters are in host memory, from where a copy to the device takes
  /// them until end_fetch(). Returns 0 for chunks that are always there.
  double begin_fetch(ChunkId chunk, double now);
  /// Ends the fetch: its copy is over, or the target was given up.
  void end_fetch(ChunkId chunk);
  /// Returns whether a fetch ahead of a use would wait for NVMe, as ChunkManager::fetch_blocks
  /// does.
  [[nodiscard]] bool fetch_blocks(ChunkId chunk, CopyMode parameter_copies) const;
  /// Returns the chunks to read ahead, in order: those that the accesses from `first` on need next
  /// and the device lacks. Decides as Runtime::announce_params does.
  [[nodiscard]] std::vector<ChunkId> announced(const Plan& plan, std::size_t first,
                                               const Residency& residency) const;
  /// Reads the chunk's parameters, unless they have been read since the last fetch; returns when
  /// they are in memory.
  double read_ahead(ChunkId chunk, double now);

  void write_gradients(ChunkId chunk, double now);
  /// Reads the chunk's gradients for the norm; returns when that is done, or `now` where they are
  /// in memory.
  double read_gradients(ChunkId chunk, double now);
  /// Reads and writes for the chunk's update; returns when that is done, or `now` where nothing of
  /// it lies here.
  double update(ChunkId chunk, double now);

  [[nodiscard]] double free_at() const noexcept { return queue_.free_at(); }
  [[nodiscard]] double busy() const noexcept { return queue_.busy(); }

 private:
  struct StoredParams {
    bool in_memory = false;  // read, and not fetched since
    double read = 0.0;       // when that read is over
    bool leased = false;     // a fetch is under way
  };

  [[nodiscard]] bool has(const std::vector<bool>& stored, ChunkId chunk) const {
    return !stored.empty() && stored[index(chunk)] &&
           placements_[index(chunk)] != Placement::kDevice;
  }
  [[nodiscard]] double weight_bytes(ChunkId chunk) const {
    return static_cast<double>(layout_.chunk(chunk).used_bytes);
  }

  const ChunkLayout& layout_;
  const std::span<const Placement> placements_;
  const OptimizerCost& optimizer_;
  const StoredPayloads& stored_;
  std::vector<StoredParams> params_;
  std::size_t num_leased_ = 0;
  ServiceQueue queue_;
};

}  // namespace castor
