#pragma once

#include <Python.h>

#include <memory>
#include <span>

#include "torch/param_gradient.h"
#include "torch/step_events.h"
#include "torch/torch_versions.h"

namespace castor {

/// Arranges that `events->enter_backward(module)` runs when the first gradient of a module's
/// outputs arrives, once per forward call and backward pass. `output` is the object that forward
/// returned: tensors are found in tuples, lists, dicts, dataclasses and other objects with a
/// __dict__. Outputs without a differentiable tensor are left alone: their module's parameters stay
/// readable in host storage. Requires the GIL; `output` is a borrowed reference.
void watch_backward(const std::shared_ptr<StepEvents>& events, ModuleId module, PyObject* output);
/// Does the same for a forward in C++, which returned these tensors. Does not need the GIL.
void watch_backward(const std::shared_ptr<StepEvents>& events, ModuleId module,
                    std::span<const at::Tensor> outputs);

/// Arranges that `events->gradient_arrived(param)` follows AccumulateGrad of `leaf`, beside any
/// hooks of the user. Returns the accumulator, to which `leaf` refers weakly: when the accumulator
/// goes, the hook goes too.
[[nodiscard]] torch_versions::NodePointer watch_gradient(std::weak_ptr<StepEvents> events,
                                                         ParamId param, const at::Tensor& leaf);

}  // namespace castor
