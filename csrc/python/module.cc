// castor._C: the binding. Signatures for type checkers are in python/castor/_C.pyi.
#include <ATen/core/grad_mode.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "c10d/device_sums.h"
#include "c10d/group_backend.h"
#include "c10d/group_messages.h"
#include "c10d/linked_groups.h"
#include "python/backend_capsule.h"
#include "python/bindings.h"
#include "python/module_hooks.h"
#include "python/names.h"
#include "python/saved_variables.h"
#include "ranks/rank_waits.h"
#include "store/lockable_bytes.h"
#include "torch/chunk_storages.h"
#include "torch/cpu_backend.h"
#include "torch/session.h"
#include "torch/step_hooks.h"
#include "torch/torch_error.h"

namespace py = pybind11;

namespace castor {
namespace {

void set_python_errors(const py::object& error, const py::object& usage_error,
                       const py::object& out_of_memory_error, const py::object& io_error,
                       const py::object& corruption_error) {
  const auto keep = [](const py::object& value) { return py::object(value).release().ptr(); };
  python_errors() = {.error = keep(error),
                     .usage_error = keep(usage_error),
                     .out_of_memory_error = keep(out_of_memory_error),
                     .io_error = keep(io_error),
                     .corruption_error = keep(corruption_error),
                     .invalid_argument = PyExc_ValueError};
}

/// Makes sure that castor.errors has given its classes: a sub-command of `castor` imports no more
/// than it needs, which may be castor._C alone.
void import_python_errors() {
  if (python_errors().error == nullptr) {
    py::module_::import("castor.errors");
  }
}

void translate(std::exception_ptr pending) {
  try {
    if (pending) {
      std::rethrow_exception(std::move(pending));
    }
  } catch (const IoError& error) {
    import_python_errors();
    // (errno, message, path): the constructor of OSError.
    const py::tuple arguments = py::make_tuple(error.error_number(), error.what(), error.path());
    PyErr_SetObject(python_class_of(error), arguments.ptr());
  } catch (const Error& error) {
    import_python_errors();
    PyErr_SetString(python_class_of(error), error.what());
  }
}

}  // namespace

std::vector<ModuleSpec> module_specs(const std::vector<PythonModuleSpec>& modules) {
  std::vector<ModuleSpec> specs;
  specs.reserve(modules.size());
  for (const auto& [name, owned, parent] : modules) {
    ModuleSpec spec{name, {}, std::nullopt};
    for (const std::uint32_t param : owned) {
      spec.params.push_back(ParamId{param});
    }
    if (parent >= 0) {
      spec.parent = ModuleId{static_cast<std::uint32_t>(parent)};
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

Trace trace_of(const std::vector<PythonEvent>& events) {
  std::vector<Event> parsed;
  parsed.reserve(events.size());
  for (const auto& [kind, id, nonmodel_bytes, time_ns] : events) {
    if (kind >= kNumEventKinds) {
      throw InvalidArgument("a trace event has kind " + std::to_string(kind) +
                            ", which this version does not know");
    }
    parsed.push_back({static_cast<EventKind>(kind), id, nonmodel_bytes, time_ns});
  }
  return Trace(std::move(parsed));
}

std::vector<PythonEvent> events_of(const std::vector<Event>& events) {
  std::vector<PythonEvent> result;
  result.reserve(events.size());
  for (const Event& event : events) {
    result.emplace_back(static_cast<std::uint8_t>(event.kind), event.id, event.nonmodel_bytes,
                        event.time_ns);
  }
  return result;
}

namespace {

std::shared_ptr<DeviceBackend> device_backend(const py::object& backend) {
  if (!py::isinstance<py::capsule>(backend) ||
      std::string_view(py::capsule(backend).name()) != kDeviceBackendCapsule) {
    throw InvalidArgument("the device backend is " + py::repr(backend).cast<std::string>() +
                          "; castor._C takes a capsule " + std::string(kDeviceBackendCapsule) +
                          ", which make_cpu_backend and its own build of castor._cuda make");
  }
  return *py::capsule(backend).get_pointer<std::shared_ptr<DeviceBackend>>();
}

using PairOfSums = std::pair<std::shared_ptr<DeviceSums>, std::shared_ptr<DeviceSums>>;

/// The ranks of three process groups of torch's; `mark`: as link_groups. `reads`:
/// the name of one for reads of weights that are cut, where they cannot; "": none are. `sums`: what
/// adds up gradients and gathers weights on the devices of `backend`; nullopt: the host does.
RankGroups rank_groups(const std::array<std::string, 3>& names,
                       const std::optional<std::string>& mark, const std::string& reads,
                       const std::optional<PairOfSums>& sums,
                       const std::shared_ptr<DeviceBackend>& backend) {
  LinkedGroups linked = link_groups(names, mark, waits_of_process());
  const std::size_t rank = linked.groups[0]->rank();
  const std::size_t size = linked.groups[0]->size();
  auto reading = std::make_shared<RankPlace>(waits_of_process(), rank, size,
                                             numbers_of(*host_backend(names[0])));
  reading->set("reads weights that other ranks keep");
  if (sums) {
    sums->first->join(linked.groups[1], backend);
    sums->second->join(linked.groups[2], backend);
  }
  return {.passes = linked.groups[0],
          .gradients = linked.groups[1],
          .updates = linked.groups[2],
          .reads = reads.empty() ? nullptr : std::make_shared<GroupMessages>(reads, reading),
          .sums = sums ? sums->first : nullptr,
          .gathers = sums ? sums->second : nullptr,
          .link = std::move(linked.link)};
}

std::shared_ptr<Session> create_session(
    std::vector<at::Tensor> params, std::vector<std::string> param_names,
    const std::vector<bool>& trained, std::vector<bool> ruled, std::vector<bool> by_row,
    const std::vector<std::optional<ScalarType>>& types,
    const std::vector<PythonModuleSpec>& modules, SessionOptions options, const py::object& backend,
    const std::optional<std::array<std::string, 3>>& groups,
    const std::optional<std::string>& memory_mark, const std::string& reads,
    const std::optional<PairOfSums>& sums, std::size_t communicator_bytes,
    std::optional<std::size_t> most_reduction_bytes, std::string reduces_on_host,
    std::size_t zero_stage, std::size_t extra_dp_size, const std::vector<std::uint32_t>& valueless,
    std::string name) {
  options.zero_stage = zero_stage;
  options.extra_dp_size = extra_dp_size;
  options.name = std::move(name);
  options.backend = device_backend(backend);
  options.state.ruled = std::move(ruled);
  options.by_row = std::move(by_row);
  if (groups) {
    options.ranks = without_gil(
        [&] { return rank_groups(*groups, memory_mark, reads, sums, options.backend); });
    options.ranks->communicator_bytes = communicator_bytes;
    if (most_reduction_bytes) {
      options.ranks->most_reduction_bytes = *most_reduction_bytes;
    }
    options.ranks->reduces_on_host = std::move(reduces_on_host);
    options.layout.world_size = options.ranks->passes->size();
  }
  // A forked child publishes nothing.
  if (const std::shared_ptr<RankHealth> health = waits_of_process()->health();
      health && health->process() == ::getpid()) {
    options.entered = [health](std::string_view pass, std::string_view module) {
      health->enter(pass, module);
    };
  }
  const std::vector<ModuleSpec> specs = module_specs(modules);
  std::vector<ParamId> without_values;
  for (const std::uint32_t param : valueless) {
    without_values.push_back(ParamId{param});
  }
  return without_gil([&] {
    return Session::create(std::move(params), std::move(param_names), trained, types, specs,
                           options, without_values);
  });
}

/// By the rule's names. Throws UsageError where another optimizer updates the parameters.
GroupOptions group_options(const Session& session, const std::vector<py::dict>& groups,
                           std::vector<std::int64_t> group_of) {
  GroupOptions options{.groups = {}, .group_of = std::move(group_of)};
  options.groups = rule_options(session.updates().chunk_updates().rule(), groups);
  return options;
}

void arm_updates(Session& session, const std::vector<py::dict>& groups,
                 std::vector<std::int64_t> group_of) {
  GroupOptions options = group_options(session, groups, std::move(group_of));
  const py::gil_scoped_release release;
  session.arm_updates(std::move(options));
}

void weights_updated(Session& session,
                     const std::vector<std::pair<std::uint32_t, std::uint64_t>>& digests) {
  std::vector<WeightDigest> updated;
  for (const auto& [param, value] : digests) {
    updated.push_back({.param = ParamId{param}, .value = value});
  }
  session.weights_updated(std::move(updated));
}

void update(Session& session, const std::vector<py::dict>& groups,
            std::vector<std::int64_t> group_of, double grad_scale) {
  const GroupOptions options = group_options(session, groups, std::move(group_of));
  const py::gil_scoped_release release;
  session.update(options, grad_scale);
}

struct NvmeFigures {
  std::uint64_t bytes = 0;
  std::uint64_t weight_bytes = 0;
  ChunkStream::Counts moved;
  std::string engine;
};

NvmeFigures nvme_figures(const Session& session) {
  const NvmeTier* const tier = session.memory().nvme();
  if (tier == nullptr) {
    return {};
  }
  const ChunkStream* const weights = tier->stream(StoragePlan::kWeights);
  return {.bytes = tier->used_bytes(),
          .weight_bytes = weights == nullptr ? 0 : weights->stored_bytes(),
          .moved = tier->counts(),
          .engine = tier->description()};
}

py::dict report(Session& session) {
  const auto [counts, transfers, nvme] = without_gil([&] {
    return std::tuple(session.runtime().counts(), session.runtime().transfers(),
                      nvme_figures(session));
  });
  py::dict figures;
  figures["peak_device_bytes"] = session.memory().device_tier()->ledger().peak();
  figures["device_budget_bytes"] = session.memory().device_tier()->ledger().budget();
  figures["peak_nonmodel_bytes"] = session.memory().nonmodel()->peak_bytes();
  figures["host_bytes"] = session.memory().host_tier()->ledger().used();
  figures["host_budget_bytes"] = session.memory().host_tier()->ledger().budget();
  figures["h2d_bytes"] = transfers.h2d_bytes;
  figures["d2h_bytes"] = transfers.d2h_bytes + session.gradients().bytes_moved();
  figures["demand_fetches"] = counts.demand_fetches;
  figures["prefetch_hits"] = counts.prefetch_hits;
  figures["evictions"] = transfers.evictions;
  figures["divergent_steps"] = counts.divergent_steps;
  figures["steps"] = counts.steps;
  figures["plans"] = counts.plans;
  figures["resident_chunks"] = counts.resident_chunks;
  figures["resident_bytes"] = counts.resident_bytes;
  figures["num_chunks"] = session.layout().chunks().size();
  figures["chunk_bytes"] = session.layout().chunk_bytes();
  figures["waste"] = session.layout().waste();
  figures["device_arena"] = session.memory().device_tier()->description();
  figures["host_arena"] = session.memory().host_tier()->description();
  const DeviceUpdates* const device_updates = session.updates().device_updates();
  figures["device_update_fraction"] = device_updates == nullptr ? 0.0 : device_updates->fraction();
  figures["device_update_bytes"] = device_updates == nullptr ? 0 : device_updates->bytes();
  figures["device_updated_elements"] =
      device_updates == nullptr ? 0 : device_updates->updated_elements();
  figures["nvme_bytes"] = nvme.bytes;
  figures["nvme_weight_bytes"] = nvme.weight_bytes;
  figures["nvme_read_bytes"] = nvme.moved.read_bytes;
  figures["nvme_written_bytes"] = nvme.moved.written_bytes;
  figures["nvme_engine"] = nvme.engine;
  SessionRanks* const ranks = session.updates().ranks();
  const bool alone = ranks == nullptr;
  figures["rank"] = alone ? 0 : ranks->rank();
  figures["ranks"] = alone ? 1 : ranks->size();
  figures["rank_link"] = alone ? "" : ranks->link();
  figures["reduced_on"] = alone ? "" : ranks->reduced_on();
  figures["reduction_communicator_bytes"] = alone ? 0 : ranks->communicator_bytes();
  figures["zero_stage"] = session.memory().zero_stage(alone ? 1 : ranks->size());
  const ShardedHostStorage& sharded = session.memory().sharded_host_storage();
  figures["rank_shared_bytes"] = session.memory().rank_host_storage().bytes();
  figures["rank_shard_bytes"] = sharded.shard_bytes();
  figures["rank_window_bytes"] = sharded.window_bytes();
  const GradientShards* const gradients = session.chunks().gradient_shards();
  figures["rank_gradient_shard_bytes"] = gradients == nullptr ? 0 : gradients->shard_bytes();
  figures["rank_gradient_copy_bytes"] = gradients == nullptr ? 0 : gradients->copy_bytes();
  figures["rank_gradient_copy_peak_bytes"] =
      gradients == nullptr ? 0 : gradients->peak_copy_bytes();
  figures["rank_read_bytes"] = sharded.shards() == nullptr ? 0 : sharded.shards()->bytes_read();
  figures["rank_sent_bytes"] =
      alone ? 0
            : ranks->bytes_sent() +
                  (sharded.shards() == nullptr ? 0 : sharded.shards()->bytes_sent());
  figures["rank_crossed_bytes"] = alone ? 0 : ranks->bytes_crossed();
  using Seconds = std::chrono::duration<double>;
  figures["rank_seconds"] = alone ? 0.0 : Seconds(ranks->time()).count();
  figures["rank_exposed_seconds"] =
      alone ? 0.0 : Seconds(ranks->gradients().figures().time()).count();
  return figures;
}

/// What a step is accounted by: cheap enough to be read after each.
std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> step_figures(Session& session) {
  const TransferCounts transfers = session.runtime().transfers();
  return {session.runtime().step_peak_device_bytes(), transfers.h2d_bytes,
          transfers.d2h_bytes + session.gradients().bytes_moved()};
}

py::dict memory(Session& session) {
  py::dict figures;
  figures["device_bytes"] = session.memory().device_bytes();
  figures["nonmodel_bytes"] = session.memory().nonmodel()->bytes();
  figures["host_bytes"] = session.memory().host_tier()->ledger().used();
  return figures;
}

/// Returns the position in the step: its events so far, and the bytes of non-model data now.
std::pair<std::size_t, std::uint64_t> step_position(Session& session) {
  const auto [events, others] = without_gil([&] {
    return std::pair(session.runtime().num_events(), session.runtime().bytes_of_others());
  });
  return {events, session.memory().nonmodel()->bytes() + others};
}

std::optional<py::dict> prediction(Session& session) {
  const auto predicted = without_gil([&] { return session.runtime().prediction(); });
  if (!predicted) {
    return std::nullopt;
  }
  py::dict figures;
  figures["peak_device_bytes"] = predicted->peak_device_bytes;
  figures["smallest_budget_bytes"] = predicted->smallest_budget_bytes;
  figures["h2d_bytes"] = predicted->h2d_bytes;
  figures["demand_fetches"] = predicted->demand_fetches;
  figures["prefetches"] = predicted->prefetches;
  figures["evictions"] = predicted->evictions;
  return figures;
}

std::optional<std::vector<PythonEvent>> trace(Session& session) {
  const auto recorded = session.runtime().trace();
  if (!recorded) {
    return std::nullopt;
  }
  return events_of(recorded->events());
}

/// A method that takes a RunLoad, with its parts as arguments.
auto with_run_load(void (Session::*method)(RunLoad)) {
  return [method](Session& session, LoadedWeights weights, bool states) {
    (session.*method)({.weights = weights, .states = states});
  };
}

/// A turn of Python's: "with session.turn(...):", on one thread.
class TurnScope {
 public:
  TurnScope(std::shared_ptr<Session> session, std::string what, bool runs_backward)
      : session_(std::move(session)),
        what_(std::move(what)),
        kind_(runs_backward ? PassTurn::Section::kRunsBackward : PassTurn::Section::kPlain) {}

  void enter() { turn_ = std::make_unique<Session::Turn>(session_, kind_, what_); }
  void leave() { turn_.reset(); }

 private:
  const std::shared_ptr<Session> session_;
  const std::string what_;
  const PassTurn::Section kind_;
  std::unique_ptr<Session::Turn> turn_;
};

void load_trace(Session& session, const std::vector<PythonEvent>& events) {
  session.runtime().load_trace(trace_of(events));
}

}  // namespace
}  // namespace castor

PYBIND11_MODULE(_C, m) {
  using castor::Session;
  m.attr("__version__") = CASTOR_VERSION;
  py::register_exception_translator(castor::translate);
  m.def("set_python_errors", &castor::set_python_errors);
  castor::PassTurn::look_by([] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  });
  m.def("last_out_of_memory", [] {
    const auto& figures = castor::last_out_of_memory();
    return std::make_tuple(figures.tier, figures.requested, figures.available, figures.budget);
  });
  m.def(
      "make_cpu_backend",
      [](std::uint64_t link) { return castor::capsule_of(castor::make_cpu_backend(link)); },
      py::kw_only(), py::arg("link_bytes_per_second"));

  py::class_<castor::GradientSummary>(m, "GradientSummary")
      .def_readonly("norm", &castor::GradientSummary::norm)
      .def_readonly("scale", &castor::GradientSummary::scale)
      .def_readonly("num_gradients", &castor::GradientSummary::num_gradients)
      .def_readonly("squares", &castor::GradientSummary::squares);

  castor::bind_options(m);
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<castor::StepEvents, std::shared_ptr<castor::StepEvents>>(m, "StepEvents")
      .def("forward_pre_hook", &castor::forward_pre_hook)
      .def("forward_hook", &castor::forward_hook)
      .def("module_call", &castor::module_call)
      .def(
          "enter_backward",
          [](castor::StepEvents& events, std::uint32_t module) {
            events.enter_backward(castor::ModuleId{module}, {});
          },
          released);
  m.attr("ModuleCall") = castor::module_call_type();
  m.def("release_saved_variables",
        [](const py::handle& node) { castor::release_saved_variables(node.ptr()); });
  py::class_<castor::TurnScope>(m, "Turn")
      .def("__enter__", &castor::TurnScope::enter, released)
      .def("__exit__", [](castor::TurnScope& scope, const py::args& /*failure*/) {
        const py::gil_scoped_release release;
        scope.leave();
      });
  m.def(
      "set_pass_patience",
      [](double seconds) {
        using Seconds = std::chrono::duration<double>;
        const auto before = castor::PassTurn::set_patience(
            std::chrono::duration_cast<std::chrono::milliseconds>(Seconds(seconds)));
        return Seconds(before).count();
      },
      py::arg("seconds"));
  castor::SessionClass session(m, "Session");
  session
      .def(py::init(&castor::create_session), py::arg("params"), py::arg("param_names"),
           py::arg("trained"), py::arg("ruled"), py::arg("by_row"), py::arg("types"),
           py::arg("modules"), py::arg("options"), py::arg("backend"), py::arg("groups"),
           py::arg("memory_mark"), py::arg("reads"), py::arg("sums"), py::arg("communicator_bytes"),
           py::arg("most_reduction_bytes"), py::arg("reduces_on_host"), py::arg("zero_stage"),
           py::arg("extra_dp_size"), py::arg("valueless"), py::arg("name"))
      .def(
          "turn",
          [](const std::shared_ptr<Session>& self, std::string what, bool runs_backward) {
            return castor::TurnScope(self, std::move(what), runs_backward);
          },
          py::arg("what"), py::kw_only(), py::arg("runs_backward") = false)
      .def(
          "set_loss_scale",
          [](Session& session, double scale) { session.gradients().set_loss_scale(scale); },
          released)
      .def("synchronise",
           [](Session& session, bool on) { return session.updates().synchronise(on); })
      .def("reduce_gradients", &Session::reduce_gradients, py::arg("optimizer"), released)
      .def("gradient_marks",
           [](const Session& session) {
             const castor::GradientMarks marks = session.gradients().marks();
             return std::pair(marks.present, marks.scale);
           })
      .def(
          "make_gradient_present",
          [](Session& session, std::uint32_t param, double scale) {
            session.make_gradient_present(castor::ParamId{param}, scale);
          },
          py::arg("param"), py::arg("scale"), released)
      .def("collect_gradients", &Session::collect_gradients, py::arg("with_norm"), released)
      .def("scale_gradients", &Session::scale_gradients, released)
      .def("refuse_gradient_edits", [](Session& session) { session.gradients().refuse_edits(); })
      .def("update", &castor::update, py::arg("groups"), py::arg("group_of"), py::arg("grad_scale"))
      .def("arm_updates", &castor::arm_updates, py::arg("groups"), py::arg("group_of"))
      .def("barrier_to_load", &Session::barrier_to_load, released)
      .def("begin_load", castor::with_run_load(&Session::begin_load), py::kw_only(),
           py::arg("weights"), py::arg("states"), released)
      .def("end_load", castor::with_run_load(&Session::end_load), py::kw_only(), py::arg("weights"),
           py::arg("states"), released)
      .def(
          "share_weights", [](Session& session) { session.updates().share_weights(); }, released)
      .def_property_readonly("consistent", py::cpp_function(&Session::consistent, released))
      .def("stay_with_parent",
           [](const py::object& self) {
             self.inc_ref();  // its destructor would wait for threads
             self.cast<Session&>().stay_with_parent();
           })
      .def("await_updates", &Session::await_updates, released)
      .def("weights_updated", &castor::weights_updated, py::arg("digests"))
      .def("finish_step", &Session::finish_step, released)
      .def("settle", py::overload_cast<>(&Session::settle), released)
      .def("move_to_host", &Session::move_to_host, released)
      .def(
          "content_of",
          [](Session& self, std::uintptr_t storage) {
            return self.content_of(reinterpret_cast<const void*>(storage));
          },
          py::arg("storage"), released)
      .def_property_readonly("steps", &Session::steps)
      .def_property_readonly("ranks_sharing",
                             [](const Session& session) -> std::size_t {
                               const castor::RankHostStorage& shared =
                                   session.memory().rank_host_storage();
                               const castor::SessionRanks* const ranks = session.updates().ranks();
                               return shared.bytes() > 0 ? ranks->size() / shared.nodes() : 1;
                             })
      .def("report", &castor::report)
      .def("memory", &castor::memory)
      .def("step_position", &castor::step_position)
      .def_property_readonly(
          "free_host_bytes",
          [](Session& held) { return held.memory().host_tier()->ledger().available(); })
      .def("prediction", &castor::prediction)
      .def("trace", &castor::trace, released)
      .def("timeline", &castor::timeline)
      .def(
          "time_next_step", [](Session& held) { return held.runtime().time_next_step(); }, released)
      .def("chunks", &castor::chunks)
      .def("step_figures", &castor::step_figures, released)
      .def("load_trace", &castor::load_trace, released);
  castor::bind_optimizer_state(session);
  castor::bind_saves(session);
  castor::bind_activation_offload(m);
  castor::bind_experts(m);

  m.def(
      "lockable_bytes",
      [](const py::object& backend, std::size_t wanted) {
        const std::shared_ptr<castor::DeviceBackend> device = castor::device_backend(backend);
        const py::gil_scoped_release release;
        return castor::lockable_bytes(*device, wanted);
      },
      py::arg("backend"), py::arg("wanted"));
  m.def(
      "is_mapped_privately",
      [](const at::Tensor& tensor) { return castor::is_mapped_privately(tensor.storage()); },
      py::arg("tensor"));

  castor::bind_adam(m);
  castor::bind_state_formats(m);
  castor::bind_rules(m);
  castor::bind_machine(m);
  castor::bind_io(m);
  castor::bind_simulator(m);
  castor::bind_rank_group(m);
}
