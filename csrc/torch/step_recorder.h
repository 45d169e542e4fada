#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/arrived_gradients.h"
#include "core/trace.h"
#include "torch/param_gradient.h"
#include "torch/step_events.h"
#include "torch/torch_versions.h"

namespace castor {

/// Reporter of the events of a model's steps, as the runtime records those of a boosted model.
/// Keeps nothing: each gradient is gone once it has arrived, as one that went to its chunk's
/// payload. Follows the gradients of `params` until it is destroyed.
class StepRecorder final : public StepEvents {
 public:
  /// Gets an event's kind, and the number of the module or chunk that the event names (Event).
  using Tell = std::function<void(EventKind, std::uint32_t)>;

  /// Makes a recorder and begins to follow gradients. `params`: in ParamId order, as autograd knows
  /// them.
  static std::shared_ptr<StepRecorder> create(ChunkLayout layout, std::vector<at::Tensor> params,
                                              Tell tell);
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  [[nodiscard]] const ChunkLayout& layout() const noexcept override { return layout_; }
  void enter(ModuleId module) override;
  void exit(ModuleId module) override;
  void enter_backward(ModuleId module, PassTurn::Origin origin) override;
  void expect_no_backward() override {}
  void gradient_arrived(ParamId param, const at::Tensor& incoming) override;

 private:
  StepRecorder(ChunkLayout layout, std::vector<at::Tensor> params, Tell tell);

  const ChunkLayout layout_;
  std::vector<at::Tensor> params_;
  const Tell tell_;
  ArrivedGradients gradients_;
  std::vector<torch_versions::NodePointer> accumulators_;
};

}  // namespace castor
