#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "torch/step_events.h"

namespace castor {

/// Makes the callables that torch.nn.Module calls around forward. copy.deepcopy of a model takes
/// its hooks along: they do nothing in another module than `owner`, which is borrowed.
pybind11::cpp_function forward_pre_hook(const std::shared_ptr<StepEvents>& events,
                                        std::uint32_t module, const pybind11::handle& owner);
pybind11::cpp_function forward_hook(const std::shared_ptr<StepEvents>& events, std::uint32_t module,
                                    const pybind11::handle& owner);

/// Makes the callable that torch.nn.Module calls instead of its own call, in the place of a
/// compiled one. `enter` and `leave` are torch's numbers of the two hooks.
///
/// - Where the module has no other hooks than these two, the callable runs their events around
///   forward, without the three microseconds that torch takes for hooks.
/// - Otherwise it runs the module's own call, with all hooks.
///
/// `owner` is held weakly. torch leaves the callable out of copies and pickles.
pybind11::object module_call(const std::shared_ptr<StepEvents>& events, std::uint32_t module,
                             const pybind11::object& owner, const pybind11::int_& enter,
                             const pybind11::int_& leave);

/// Returns the type of the callables that module_call makes.
pybind11::type module_call_type();

}  // namespace castor
