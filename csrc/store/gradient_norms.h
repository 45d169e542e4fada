#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "core/chunk_manager.h"
#include "core/executor.h"
#include "core/runtime.h"
#include "store/gradient_shards.h"
#include "store/session_device.h"
#include "store/stored_weights.h"

namespace castor {

/// Sums of the squares of a step's gradients, wherever these are: on the host, on the device, on
/// NVMe or sharded over ranks. The bits depend on none of these. Owned by whoever closes the steps;
/// used by one thread at a time.
class GradientNorms {
 public:
  /// `weights`: nullptr where no gradients are on NVMe. `shards`: nullptr where none are sharded.
  /// All arguments outlive this.
  GradientNorms(const ChunkManager& manager, StoredWeights* weights, const GradientShards* shards,
                Executor& executor, const SessionDevice& device)
      : manager_(manager),
        layout_(manager.layout()),
        weights_(weights),
        shards_(shards),
        executor_(executor),
        device_(device) {}

  using Present = std::function<bool(ParamId)>;
  /// Function that adds the squares of sharded gradients, at each parameter's place.
  using Measure = std::function<void(std::span<double> squares)>;
  /// Returns the sum of each parameter's squares, 0 where it has no gradient. Waits for the device.
  /// May throw IoError or CorruptionError.
  [[nodiscard]] std::vector<double> squares(Runtime& runtime, const Present& present,
                                            const Measure& measure_shards) const;

 private:
  /// Returns the sum for all of the parameter, also where other ranks update parts: a sum of their
  /// sums would have other bits than one process's (but see DeviceKernels::square_norms). `data`:
  /// address of the chunk's gradients.
  [[nodiscard]] double square(ParamId param, const std::byte* data, Executor* executor) const;
  [[nodiscard]] bool in_host_memory(ChunkId chunk) const;
  void measure_on_host(const Present& present, std::span<double> squares) const;
  void measure_on_device(const Present& present, std::span<double> squares) const;
  void measure_stored(const Present& present, std::span<double> squares) const;

  const ChunkManager& manager_;
  const ChunkLayout& layout_;
  StoredWeights* const weights_;
  const GradientShards* const shards_;
  Executor& executor_;
  const SessionDevice& device_;
};

}  // namespace castor
