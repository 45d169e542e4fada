#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "torch/step_events.h"

namespace castor {

/// The callables that torch.nn.Module calls around forward. copy.deepcopy of a model takes its
/// hooks along: they do nothing in another module than `owner`, which is borrowed.
pybind11::cpp_function forward_pre_hook(const std::shared_ptr<StepEvents>& events,
                                        std::uint32_t module, const pybind11::handle& owner);
pybind11::cpp_function forward_hook(const std::shared_ptr<StepEvents>& events, std::uint32_t module,
                                    const pybind11::handle& owner);

/// What torch.nn.Module calls instead of its own call, in the place of a compiled one: where the
/// module has no other hooks than these two, by torch's numbers, their events around its forward,
/// without the three microseconds that torch takes for hooks. Else its own call, hooks and all.
/// `owner` is held weakly. torch leaves this out of copies and pickles.
pybind11::object module_call(const std::shared_ptr<StepEvents>& events, std::uint32_t module,
                             const pybind11::object& owner, const pybind11::int_& enter,
                             const pybind11::int_& leave);

/// The type of what module_call returns.
pybind11::type module_call_type();

}  // namespace castor
