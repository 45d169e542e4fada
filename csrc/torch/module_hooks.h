#pragma once

#include <Python.h>

#include <memory>

#include "torch/session.h"

namespace castor {

/// Arranges that `session->enter_backward(module)` runs when the first gradient of a module's
/// outputs arrives, once per forward call and backward pass. `output` is whatever forward returned:
/// tensors are found in tuples, lists, dicts, dataclasses and other objects with a __dict__.
/// Outputs without a differentiable tensor are left alone: their module's parameters stay readable
/// at home. Requires the GIL; a borrowed reference.
void watch_backward(const std::shared_ptr<Session>& session, ModuleId module, PyObject* output);

}  // namespace castor
