#pragma once

#include <ATen/core/Tensor.h>

#include "core/chunk_layout.h"
#include "core/pass_turn.h"

namespace castor {

/// Receiver of the events of a model's steps, which the hooks of step_hooks.h report: the session,
/// or whoever wants to know the same events (StepRecorder). Owned jointly by the module hooks. Any
/// thread may call it. Each implementation says whether passes of several threads wait for each
/// other.
class StepEvents {
 public:
  virtual ~StepEvents() = default;

  /// Returns the layout of the model, which outlives the hooks.
  [[nodiscard]] virtual const ChunkLayout& layout() const noexcept = 0;
  /// Reports that a module's forward is about to begin.
  virtual void enter(ModuleId module) = 0;
  /// Reports that a module's forward is over, or has failed.
  virtual void exit(ModuleId module) = 0;
  /// Returns which pass makes the graph of the forward under way, which the caller runs.
  [[nodiscard]] virtual PassTurn::Origin origin() const noexcept { return {}; }
  /// Reports the first gradient of the module's outputs, once per forward and backward pass.
  /// `origin`: that of the forward.
  virtual void enter_backward(ModuleId module, PassTurn::Origin origin) = 0;
  /// Reports that no backward will follow the forward that just ended: it failed, or has no result.
  virtual void expect_no_backward() = 0;
  /// Reports that AccumulateGrad of a parameter has run, which was given `incoming`.
  virtual void gradient_arrived(ParamId param, const at::Tensor& incoming) = 0;
};

}  // namespace castor
