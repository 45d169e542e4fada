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

/// Returns the result of `function`, called without Python's global lock. A caller that may wait
/// for a mutex of castor's, or for work under way, gives the lock up first (torch/gil.h).
template <typename Function>
[[nodiscard]] auto without_gil(Function&& function) {
  const pybind11::gil_scoped_release released;
  return function();
}

/// Conversions of the values that Python passes to the core; they throw InvalidArgument for unknown
/// values.
[[nodiscard]] std::vector<ModuleSpec> module_specs(const std::vector<PythonModuleSpec>& modules);
[[nodiscard]] Trace trace_of(const std::vector<PythonEvent>& events);
[[nodiscard]] std::vector<PythonEvent> events_of(const std::vector<Event>& events);

/// Binds castor._C.SessionOptions and its parts, and NAMES.
void bind_options(pybind11::module_& module);

/// Binds castor._C.AdamArrays: the fused Adam over ordinary CPU tensors, for HybridAdam used alone.
void bind_adam(pybind11::module_& module);

/// Converts the options of groups, which are named as the rule names them.
[[nodiscard]] std::vector<RuleOptions> rule_options(const UpdateRule& rule,
                                                    const std::vector<pybind11::dict>& groups);
/// Binds the functions of castor._C about update rules: rule_state_names, rule_formats,
/// check_rule_options.
void bind_rules(pybind11::module_& module);

/// Binds the conversions of castor._C between its state formats and fp32 tensors.
void bind_state_formats(pybind11::module_& module);

/// Binds castor._C's functions about this machine: NUMA nodes, the host arena, measured bandwidths.
void bind_machine(pybind11::module_& module);
/// Binds castor._C.IoBench and why_no_io_uring, with which `castor io-bench` measures.
void bind_io(pybind11::module_& module);
/// Binds castor._C.Simulator, which plans and simulates steps of a model that is not built.
void bind_simulator(pybind11::module_& module);

/// Binds castor._C.RankGroup, through which Python's side of the ranks communicates, and RankWait
/// and long_wait.
void bind_rank_group(pybind11::module_& module);

/// Binds castor._C.ActivationOffload and the types of its results.
void bind_activation_offload(pybind11::module_& module);

/// Binds castor._C.Experts and castor._C.ExpertRows.
void bind_experts(pybind11::module_& module);

class RankWaits;
/// Returns the record of this process's waits for other ranks, through any of its process groups.
[[nodiscard]] const std::shared_ptr<RankWaits>& waits_of_process();

class Session;
class StepEvents;
using SessionClass = pybind11::class_<Session, StepEvents, std::shared_ptr<Session>>;

/// Binds the methods of Session for the optimizer's state: formats, masters, moments.
void bind_optimizer_state(SessionClass& session);

/// Binds the methods of Session for a save that reads it beside the training.
void bind_saves(SessionClass& session);

/// Returns the last finished step, event by event, as lists of tuples; nullopt before there is one.
[[nodiscard]] std::optional<pybind11::dict> timeline(Session& session);
/// Returns the contents of each chunk, and where its payloads live.
[[nodiscard]] pybind11::list chunks(Session& session);

}  // namespace castor
