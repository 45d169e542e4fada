#pragma once

#include <ATen/core/Tensor.h>

#include "core/chunk_layout.h"
#include "core/pass_turn.h"

namespace castor {

/// What is told of the steps of a model, by the hooks of step_hooks.h: the session, or whoever
/// wants to know the same moments (StepRecorder). Owned jointly by the module hooks. Any thread may
/// call; whoever is told says whether passes of several threads wait for each other.
class StepEvents {
 public:
  virtual ~StepEvents() = default;

  /// Of the model; outlives the hooks.
  [[nodiscard]] virtual const ChunkLayout& layout() const noexcept = 0;
  /// Before a module's forward.
  virtual void enter(ModuleId module) = 0;
  /// After it, or when it failed.
  virtual void exit(ModuleId module) = 0;
  /// Which pass makes the graph of the forward under way, which the caller runs.
  [[nodiscard]] virtual PassTurn::Origin origin() const noexcept { return {}; }
  /// At the first gradient of its outputs, once per forward and backward pass. `origin`: of the
  /// forward.
  virtual void enter_backward(ModuleId module, PassTurn::Origin origin) = 0;
  /// No backward will follow the forward that just ended: it failed, or has no result.
  virtual void expect_no_backward() = 0;
  /// Follows AccumulateGrad of a parameter, which was given `incoming`.
  virtual void gradient_arrived(ParamId param, const at::Tensor& incoming) = 0;
};

}  // namespace castor
