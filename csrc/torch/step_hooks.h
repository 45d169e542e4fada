#pragma once

#include <memory>
#include <span>

#include "torch/param_gradient.h"
#include "torch/step_events.h"
#include "torch/torch_versions.h"

namespace castor {

/// Arranges that `events->enter_backward(module)` runs when the first gradient of a module's
/// outputs arrives, once per forward call and backward pass. Outputs without a gradient function
/// are left alone: where no output has one, the module's parameters stay readable in host storage.
void watch_backward(const std::shared_ptr<StepEvents>& events, ModuleId module,
                    std::span<const at::Tensor> outputs);

/// Arranges that `events->gradient_arrived(param)` follows AccumulateGrad of `leaf`, beside any
/// hooks of the user. Returns the accumulator, to which `leaf` refers weakly: when the accumulator
/// goes, the hook goes too.
[[nodiscard]] torch_versions::NodePointer watch_gradient(std::weak_ptr<StepEvents> events,
                                                         ParamId param, const at::Tensor& leaf);

}  // namespace castor
