// The settings of a session, as typed classes: castor._C.SessionOptions and its parts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "python/names.h"
#include "store/session_options.h"

namespace py = pybind11;

namespace castor {
namespace {

template <typename... Enums>
py::dict names_of() {
  py::dict names;
  const auto add = [&names]<typename Enum>(Names<Enum>) {
    py::list known;
    for (const auto& [value, name] : Names<Enum>::kAll) {
      known.append(py::str(std::string(name)));
    }
    names[py::str(std::string(Names<Enum>::kName))] = py::tuple(known);
  };
  (add(Names<Enums>()), ...);
  return names;
}

void bind_parts(py::module_& module) {
  py::class_<PlacementOptions>(module, "PlacementOptions")
      .def(py::init(
               [](PlacementPolicy policy, double offload_optim_frac, double offload_param_frac) {
                 return PlacementOptions{.policy = policy,
                                         .offload_optim_frac = offload_optim_frac,
                                         .offload_param_frac = offload_param_frac};
               }),
           py::kw_only(), py::arg("policy"), py::arg("offload_optim_frac"),
           py::arg("offload_param_frac"));
  py::class_<RuntimeOptions>(module, "RuntimeOptions")
      .def(py::init([](std::size_t max_prefetch, double warmup_nonmodel_ratio,
                       double steady_cap_ratio, double margin_ratio) {
             return RuntimeOptions{.max_prefetch = max_prefetch,
                                   .warmup_nonmodel_ratio = warmup_nonmodel_ratio,
                                   .steady_cap_ratio = steady_cap_ratio,
                                   .margin_ratio = margin_ratio};
           }),
           py::kw_only(), py::arg("max_prefetch"), py::arg("warmup_nonmodel_ratio"),
           py::arg("steady_cap_ratio"), py::arg("margin_ratio"));
  py::class_<Reservation>(module, "Reservation");
  py::class_<SharedBudgets, std::shared_ptr<SharedBudgets>>(module, "SharedBudgets")
      .def(py::init<std::size_t, std::size_t, std::size_t>(), py::kw_only(),
           py::arg("device_bytes"), py::arg("host_bytes"), py::arg("nvme_bytes"))
      .def("take_communicators", &SharedBudgets::take_communicators, py::arg("num_bytes"),
           py::call_guard<py::gil_scoped_release>(), py::keep_alive<0, 1>())
      .def_property_readonly(
          "num_models",
          py::cpp_function(&SharedBudgets::num_models, py::call_guard<py::gil_scoped_release>()));
  py::class_<NvmeOptions>(module, "NvmeOptions")
      .def(py::init([](std::vector<std::string> directories, std::uint64_t budget_bytes,
                       bool verify, bool holds_activations, bool in_memory) {
             return NvmeOptions{.directories = std::move(directories),
                                .in_memory = in_memory,
                                .budget_bytes = budget_bytes,
                                .verification = verify ? Verification::kOn : Verification::kOff,
                                .holds_activations = holds_activations};
           }),
           py::kw_only(), py::arg("directories"), py::arg("budget_bytes"), py::arg("verify"),
           py::arg("holds_activations"), py::arg("in_memory"));
  py::class_<OptimizerStateOptions>(module, "StateOptions")
      .def(py::init([](const std::optional<std::string>& rule, StateFormat state_format,
                       std::optional<NvmeOptions> nvme, double nvme_fraction,
                       double device_fraction, bool device_fraction_adapts) {
             return OptimizerStateOptions{
                 .rule = rule ? make_update_rule(*rule, state_format) : nullptr,
                 .nvme = std::move(nvme),
                 .nvme_fraction = nvme_fraction,
                 .device_share = {.fraction = device_fraction, .adapts = device_fraction_adapts}};
           }),
           py::kw_only(), py::arg("rule"), py::arg("state_format"), py::arg("nvme"),
           py::arg("nvme_fraction"), py::arg("device_fraction"), py::arg("device_fraction_adapts"));
}

}  // namespace

void bind_options(py::module_& module) {
  module.attr("NAMES") = names_of<ScalarType, StateFormat, PlacementPolicy, Reduction, Overlap,
                                  LoadedWeights, EventKind, TransferKind, TransferCause, Guidance,
                                  CopyMode, UpdateCores, PipelineStyle, PipelinePass>();
  bind_parts(module);
  py::class_<SessionOptions>(module, "SessionOptions")
      .def(py::init([](ScalarType precision, std::size_t chunk_bytes,
                       const PlacementOptions& placement, RuntimeOptions runtime,
                       std::shared_ptr<SharedBudgets> budgets, OptimizerStateOptions state,
                       Overlap overlap, std::size_t num_threads) {
             runtime.policy = placement.policy;
             return SessionOptions{.precision = precision,
                                   .layout = {.chunk_bytes = chunk_bytes, .world_size = 1},
                                   .placement = placement,
                                   .runtime = runtime,
                                   .budgets = std::move(budgets),
                                   .name = {},  // given to the session, with the backend
                                   .backend = nullptr,
                                   .state = std::move(state),
                                   .overlap = overlap,
                                   .num_threads = num_threads};
           }),
           py::kw_only(), py::arg("precision"), py::arg("chunk_bytes"), py::arg("placement"),
           py::arg("runtime"), py::arg("budgets").none(false), py::arg("state"), py::arg("overlap"),
           py::arg("num_threads"));
}

}  // namespace castor
