#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "core/consistency_check.h"
#include "core/copy_engine.h"
#include "core/payload.h"
#include "store/device_backend.h"
#include "store/device_gradients.h"
#include "store/gradient_shards.h"

namespace castor {

/// Seam of a model's gradients: which have come, and who may still see them (GradientSink in
/// csrc/torch). One thread at a time runs backward and step; any thread may call wait().
class ChunkGradients {
 public:
  virtual ~ChunkGradients() = default;

  /// Returns the chunk's gradient payload; nullptr where the chunk is frozen, or its gradients are
  /// sharded.
  [[nodiscard]] virtual Payload* payload(ChunkId chunk) const = 0;
  /// Returns whether the parameter had a gradient when the step was closed.
  [[nodiscard]] virtual bool present(ParamId param) const = 0;
  /// Returns whether nobody has written the parameter's gradient since castor did.
  [[nodiscard]] virtual bool untouched(ParamId param) const = 0;
  /// Returns whether there is any tensor over the chunk's gradients.
  [[nodiscard]] virtual bool seen(ChunkId chunk) const = 0;
  /// Returns whether several passes of this step may bring gradients of the chunk.
  [[nodiscard]] virtual bool in_several_passes(ChunkId chunk) const = 0;
  /// Returns which gradients this rank has.
  [[nodiscard]] virtual GradientMarks marks() const = 0;
  /// Returns the contents that a full copy of the chunk's sharded gradients has to begin with.
  [[nodiscard]] virtual GradientShards::Contents contents_of_copy(ChunkId chunk) const = 0;
  /// Returns the ticket of the chunk's latest gradient that is on its way; kNone if there is none.
  [[nodiscard]] virtual CopyTicket last_copy_of(ChunkId chunk) const = 0;
  /// Returns a fence behind what the device's kernels have been given to add to gradients in host
  /// storage.
  [[nodiscard]] virtual std::unique_ptr<ComputeFence> fence() const = 0;

  /// Returns when the chunk's gradients have arrived; rethrows a copy's failure.
  virtual void wait(ChunkId chunk) = 0;
  /// Same as wait(), for another thread than the one that computes: takes and frees nothing on the
  /// device meanwhile, where the other thread counts on each byte.
  virtual void wait_beside(ChunkId chunk) = 0;
  /// Gives tensors over gradients that p.grad no longer refers to memory of their own, so that
  /// their holders keep the values. Call before the chunk's payload is overwritten.
  virtual void leave_to_holders(ChunkId chunk) = 0;
  /// Brings a gradient into the parameter's payload, since some rank has one, of a loss with that
  /// scale: this rank's own, or zeros where it has none.
  virtual void make_present(ParamId param, double scale) = 0;
  /// Calls `work` while all of the chunk's gradients are in memory, complete. `work` makes them
  /// those of all ranks.
  virtual void average(ChunkId chunk, const std::function<void()>& work) = 0;
  /// Has gradients of chunks that gather (DeviceGradients::begin) added there from now on; nullptr:
  /// none gather.
  virtual void gather_in(DeviceGradients* gathered) = 0;
  /// Notes that all of the chunk's gradients have come, and become those of all ranks without
  /// average().
  virtual void hand_over(ChunkId chunk) = 0;
};

}  // namespace castor
