#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace castor {

/// castor._C.AdamArrays: the fused Adam over ordinary CPU tensors, for HybridAdam used alone.
void bind_adam(pybind11::module_& module);

/// The conversions of castor._C between its state formats and fp32 tensors.
void bind_state_formats(pybind11::module_& module);

/// What `castor io-bench` measures with: castor._C.IoBench and why_no_io_uring.
void bind_io(pybind11::module_& module);

class Session;

/// The last finished step, moment by moment, as lists of tuples; nullopt before there is one.
[[nodiscard]] std::optional<pybind11::dict> timeline(Session& session);
/// What each chunk holds, and where its payloads live.
[[nodiscard]] pybind11::list chunks(Session& session);

}  // namespace castor
