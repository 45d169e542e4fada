#pragma once

#include <Python.h>

#include <memory>

#include "torch/param_gradient.h"
#include "torch/step_events.h"
#include "torch/torch_versions.h"

namespace castor {

/// Arranges that `events->enter_backward(module)` runs when the first gradient of a module's
/// outputs arrives, once per forward call and backward pass. `output` is whatever forward returned:
/// tensors are found in tuples, lists, dicts, dataclasses and other objects with a __dict__.
/// Outputs without a differentiable tensor are left alone: their module's parameters stay readable
/// at home. Requires the GIL; a borrowed reference.
void watch_backward(const std::shared_ptr<StepEvents>& events, ModuleId module, PyObject* output);

/// Arranges that `events->gradient_arrived(param)` follows AccumulateGrad of `leaf`, beside any
/// hooks of the user. Returns the accumulator, to which a leaf refers weakly: the hook goes with
/// it.
[[nodiscard]] torch_versions::NodePointer watch_gradient(std::weak_ptr<StepEvents> events,
                                                         ParamId param, const at::Tensor& leaf);

}  // namespace castor
