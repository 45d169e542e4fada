#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>

namespace castor {

/// castor._C.AdamArrays: the fused Adam over ordinary CPU tensors, for HybridAdam used alone.
void bind_adam(pybind11::module_& module);

/// The conversions of castor._C between its state formats and fp32 tensors.
void bind_state_formats(pybind11::module_& module);

/// castor._C's look at this machine: NUMA nodes, the host arena, measured bandwidths.
void bind_machine(pybind11::module_& module);

class Session;

/// What Session has of the optimizer's state: formats, masters, moments.
void bind_optimizer_state(pybind11::class_<Session, std::shared_ptr<Session>>& session);

/// The last finished step, moment by moment, as lists of tuples; nullopt before there is one.
[[nodiscard]] std::optional<pybind11::dict> timeline(Session& session);
/// What each chunk holds, and where its payloads live.
[[nodiscard]] pybind11::list chunks(Session& session);

}  // namespace castor
