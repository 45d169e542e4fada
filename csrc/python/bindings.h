#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/chunk_layout.h"
#include "core/trace.h"
#include "optim/update_rule.h"

namespace castor {

/// (name, positions of its parameters, position of its parent or -1).
using PythonModuleSpec = std::tuple<std::string, std::vector<std::uint32_t>, std::int64_t>;
/// (kind, id, nonmodel_bytes, time_ns).
using PythonEvent = std::tuple<std::uint8_t, std::uint32_t, std::uint64_t, std::uint64_t>;

/// What `function` returns, computed without Python's global lock: whatever may wait for a mutex of
/// castor's, or for work under way, gives it up first (torch/gil.h).
template <typename Function>
[[nodiscard]] auto without_gil(Function&& function) {
  const pybind11::gil_scoped_release released;
  return function();
}

/// What Python passes to the core; throws InvalidArgument for what it does not know.
[[nodiscard]] std::vector<ModuleSpec> module_specs(const std::vector<PythonModuleSpec>& modules);
[[nodiscard]] Trace trace_of(const std::vector<PythonEvent>& events);
[[nodiscard]] std::vector<PythonEvent> events_of(const std::vector<Event>& events);

/// castor._C.SessionOptions and its parts, and NAMES.
void bind_options(pybind11::module_& module);

/// castor._C.AdamArrays: the fused Adam over ordinary CPU tensors, for HybridAdam used alone.
void bind_adam(pybind11::module_& module);

/// The options of groups, by the rule's names for them.
[[nodiscard]] std::vector<RuleOptions> rule_options(const UpdateRule& rule,
                                                    const std::vector<pybind11::dict>& groups);
/// What castor._C tells of update rules: rule_state_names, rule_formats, check_rule_options.
void bind_rules(pybind11::module_& module);

/// The conversions of castor._C between its state formats and fp32 tensors.
void bind_state_formats(pybind11::module_& module);

/// castor._C's look at this machine: NUMA nodes, the host arena, measured bandwidths.
void bind_machine(pybind11::module_& module);
/// What `castor io-bench` measures with: castor._C.IoBench and why_no_io_uring; io_fault_counts.
void bind_io(pybind11::module_& module);
/// castor._C.Simulator: plans and simulates steps of a model that is not built.
void bind_simulator(pybind11::module_& module);

/// castor._C.RankGroup: what Python's side of the ranks tells the others; RankWait and long_wait.
void bind_rank_group(pybind11::module_& module);

/// castor._C.ActivationOffload and what it hands out.
void bind_activation_offload(pybind11::module_& module);

class RankWaits;
/// Where this process waits for other ranks, through any of its process groups.
[[nodiscard]] const std::shared_ptr<RankWaits>& waits_of_process();

class Session;
class StepEvents;
using SessionClass = pybind11::class_<Session, StepEvents, std::shared_ptr<Session>>;

/// What Session has of the optimizer's state: formats, masters, moments.
void bind_optimizer_state(SessionClass& session);

/// What Session has for a save that reads it beside the training.
void bind_saves(SessionClass& session);

/// The last finished step, moment by moment, as lists of tuples; nullopt before there is one.
[[nodiscard]] std::optional<pybind11::dict> timeline(Session& session);
/// What each chunk holds, and where its payloads live.
[[nodiscard]] pybind11::list chunks(Session& session);

}  // namespace castor
