// castor._C.Simulator: the planner and the simulator for castor.estimate.
#include "core/simulator.h"

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/activation_plan.h"
#include "core/error.h"
#include "core/hybrid_placement.h"
#include "core/pipeline_schedule.h"
#include "core/placement.h"
#include "core/planner.h"
#include "optim/rule_of_type.h"
#include "optim/state_format.h"
#include "python/bindings.h"
#include "python/names.h"
#include "python/state_tensors.h"
#include "store/device_gradients.h"
#include "store/device_updates.h"
#include "store/rank_host_bytes.h"
#include "store/storage_plan.h"
#include "torch/optimizer_state.h"
#include "torch/step_recorder.h"

namespace py = pybind11;

namespace castor {
namespace {

/// (name, number of elements, trainable).
using PythonParamSpec = std::tuple<std::string, std::size_t, bool>;

CopyMode copy_mode(const py::dict& options, const char* key) {
  return options[key].cast<CopyMode>();
}

/// Throws InvalidArgument for a format that the rule or parameters of the type do not have.
std::shared_ptr<const UpdateRule> rule_for(const std::string& name, ScalarType type,
                                           StateFormat format) {
  std::shared_ptr<const UpdateRule> rule = make_update_rule(name, format);
  if (type != ScalarType::kBFloat16 && rule->splits_masters()) {
    throw InvalidArgument("the state format '" + std::string(to_string(format)) +
                          "' is for bfloat16 parameters; " + std::string(to_string(type)) +
                          " ones have 'fp32'");
  }
  return rule;
}

/// Of a chunk long enough that blocks do not show.
double state_bytes_per_element(ScalarType type, const UpdateRule& rule) {
  constexpr std::size_t kNumel = std::size_t{1} << 20;
  const ChunkSpec chunk{.type = type, .used_bytes = kNumel * size_of(type)};
  std::size_t bytes = 0;
  for (const PayloadSpec& payload : state_payloads(chunk, &rule)) {
    bytes += payload.bytes;
  }
  return static_cast<double>(bytes) / kNumel;
}

/// A model laid out in chunks, and what a step of it would take on hardware of any kind.
class Simulator {
 public:
  Simulator(const std::vector<PythonParamSpec>& params,
            const std::vector<PythonModuleSpec>& modules, ScalarType precision,
            std::size_t chunk_bytes, StateFormat state_format, std::size_t num_ranks,
            const std::vector<bool>& ruled, const std::string& rule,
            const std::vector<bool>& in_fp32, const std::vector<bool>& by_row)
      : type_(precision),
        rule_(rule_for(rule, type_, state_format)),
        layout_(param_specs(params, ruled, in_fp32, by_row, type_), module_specs(modules),
                {.chunk_bytes = chunk_bytes,
                 .world_size = num_ranks,
                 .param_alignment = param_alignment(rule_.get(), type_)}) {}

  /// Tells Python of the moments of steps of the model with these parameters, as (kind, module or
  /// chunk).
  [[nodiscard]] std::shared_ptr<StepEvents> follow(
      std::vector<at::Tensor> params,
      const std::function<void(std::uint8_t, std::uint32_t)>& tell) const {
    if (params.size() != layout_.params().size()) {
      throw InvalidArgument("there are " + std::to_string(params.size()) + " parameters, and " +
                            std::to_string(layout_.params().size()) + " in the layout");
    }
    return StepRecorder::create(
        layout_, std::move(params),
        [tell](EventKind kind, std::uint32_t id) { tell(static_cast<std::uint8_t>(kind), id); });
  }

  /// The chunk that each parameter lies in.
  [[nodiscard]] std::vector<std::size_t> chunks() const {
    std::vector<std::size_t> chunks;
    for (std::size_t i = 0; i < layout_.params().size(); ++i) {
      chunks.push_back(index(layout_.place(ParamId{static_cast<std::uint32_t>(i)}).chunk));
    }
    return chunks;
  }

  /// What a session keeps where, of the keys "host_bytes", "nvme_bytes" and "nvme_weight_bytes".
  [[nodiscard]] py::dict places(const py::dict& options) const {
    py::dict result;
    report(storage_plan(placements(options), options), result);
    return result;
  }

  /// The most bytes of device memory in which gradients gather until ranks have reduced them.
  [[nodiscard]] std::size_t gradient_buffer_bytes() const {
    return DeviceGradients::most_buffers(layout_).total_bytes();
  }

  [[nodiscard]] py::dict run(const std::vector<PythonEvent>& events,
                             const std::vector<double>& compute_seconds,
                             const py::dict& options) const {
    const auto get = [&options](const char* key) { return options[key]; };
    const auto speed = [&get](const char* key) { return get(key).cast<double>(); };
    std::vector<Placement> placements = this->placements(options);
    const Hardware hardware{
        .h2d_bytes_per_second = speed("h2d_bytes_per_second"),
        .d2h_bytes_per_second = speed("d2h_bytes_per_second"),
        .dram_bytes_per_second = speed("dram_bytes_per_second"),
        .device_memory_bytes_per_second = speed("device_memory_bytes_per_second"),
        .nvme_bytes_per_second = speed("nvme_bytes_per_second"),
        .update_bytes_per_second = speed("update_bytes_per_second"),
        .parameter_copies = copy_mode(options, "parameter_copies"),
        .gradient_copies = copy_mode(options, "gradient_copies"),
        .update_cores = get("update_cores").cast<UpdateCores>(),
        .reserved_device_bytes = copy_mode(options, "gradient_copies") == CopyMode::kOverlapped
                                     ? largest_gradient_bytes(layout_) + ring_bytes(options) +
                                           buffer_bytes(options, placements)
                                     : 0,
        .gathering_ranks = get("gathering_ranks").cast<std::uint64_t>()};
    const OptimizerCost optimizer = optimizer_cost(options);

    const Trace trace = trace_of(events);
    std::size_t fixed_device_bytes = hardware.reserved_device_bytes;
    for (std::size_t i = 0; i < placements.size(); ++i) {
      if (placements[i] == Placement::kDevice) {
        fixed_device_bytes += payload_bytes(layout_.chunks()[i], optimizer);
      }
    }
    PlanOptions plan_options{.device_budget_bytes = get("device_bytes").cast<std::size_t>(),
                             .fixed_device_bytes = fixed_device_bytes,
                             .max_prefetch = get("max_prefetch").cast<std::size_t>(),
                             .policy = policy_of(options)};
    // What promoted chunks take is given back where it is needed: this is the least that does.
    const Prediction streamed = make_plan(trace, layout_, placements, plan_options).prediction();
    const StoragePlan places = storage_plan(placements, options);
    const Resident resident = make_resident(trace, &placements, &plan_options, optimizer,
                                            places.stored, get("margin_ratio").cast<double>());
    const Plan plan = make_plan(trace, layout_, placements, plan_options);
    SimulatedStep step = simulate_step(trace, compute_seconds, layout_, placements, plan, hardware,
                                       optimizer, places.stored);
    step.peak_device_bytes += resident.parameter_bytes;
    py::dict result = figures(step, streamed, resident.num_resident);
    report(places, result);
    return result;
  }

 private:
  /// What promotions cost on the device beside the payloads, which the simulator counts. On the
  /// host nothing changes: the chunks' places there stay theirs.
  struct Resident {
    std::size_t num_resident = 0;
    /// The parameters take whole slots there, and formats whose masters are partly in them keep a
    /// second copy.
    std::uint64_t parameter_bytes = 0;
  };

  [[nodiscard]] std::uint64_t resident_parameter_bytes(const ChunkSpec& chunk) const {
    const bool copied = chunk.has_state && rule_of_type(*rule_, chunk.type).splits_masters();
    return chunk.capacity_bytes - (copied ? 0 : chunk.used_bytes);
  }

  static PlacementPolicy policy_of(const py::dict& options) {
    return options["policy"].cast<PlacementPolicy>();
  }

  [[nodiscard]] std::vector<Placement> placements(const py::dict& options) const {
    return place_chunks(layout_,
                        {.policy = policy_of(options),
                         .offload_optim_frac = options["offload_optim_frac"].cast<double>(),
                         .offload_param_frac = options["offload_param_frac"].cast<double>()});
  }

  [[nodiscard]] StoragePlan storage_plan(const std::vector<Placement>& placements,
                                         const py::dict& options) const {
    const bool has_nvme = options["nvme_bytes_per_second"].cast<double>() > 0.0;
    const auto sharing = options["ranks_sharing"].cast<std::size_t>();
    const auto host_bytes = options["host_bytes"].cast<std::size_t>();
    RankHostBytes of_ranks;
    if (layout_.world_size() > 1) {
      of_ranks = rank_host_bytes(layout_, placements, layout_.world_size(), sharing,
                                 options["reduced_on"].cast<ReducedOn>());
    }
    const std::size_t shared = of_ranks.weights_share + of_ranks.gradients_share;
    StoragePlan plan = plan_storage(
        layout_, placements,
        {.rule = rule_, .nvme = has_nvme ? std::optional(NvmeOptions{}) : std::nullopt},
        host_bytes - std::min(host_bytes, shared + of_ranks.room_for_copies),
        sharing > 1 ? HostStoragePayer::kRankHostStorage : HostStoragePayer::kHostBudget);
    plan.host_bytes += shared + of_ranks.window;
    return plan;
  }

  static void report(const StoragePlan& places, py::dict& result) {
    result["host_bytes"] = places.host_bytes;
    result["nvme_bytes"] = places.nvme_bytes();
    result["nvme_weight_bytes"] = places.nvme[StoragePlan::kWeights].stored_bytes();
  }

  /// Between steps, as Runtime::place does.
  Resident make_resident(const Trace& trace, std::vector<Placement>* placements,
                         PlanOptions* plan_options, const OptimizerCost& optimizer,
                         const StoredPayloads& stored, double margin_ratio) const {
    std::vector<std::size_t> bytes;
    for (const ChunkSpec& chunk : layout_.chunks()) {
      bytes.push_back(payload_bytes(chunk, optimizer) + resident_parameter_bytes(chunk));
    }
    std::vector<bool> candidates;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      candidates.push_back(!stored.states[i] && !stored.weights[i]);
    }
    const Promotions promotions =
        choose_promotions(trace, layout_, *placements, bytes, candidates,
                          {.plan = *plan_options, .margin_ratio = margin_ratio});
    Resident resident{.num_resident = promotions.chunks.size()};
    for (const ChunkId chunk : promotions.chunks) {
      (*placements)[index(chunk)] = Placement::kDevice;
      resident.parameter_bytes += resident_parameter_bytes(layout_.chunk(chunk));
    }
    plan_options->fixed_device_bytes += promotions.bytes;
    return resident;
  }

  /// `ruled`: per parameter, whether the optimizer's rule updates it; empty: all. `in_fp32`:
  /// whether it is float32 whatever `type` is; empty: none.
  static std::vector<ParamSpec> param_specs(const std::vector<PythonParamSpec>& params,
                                            const std::vector<bool>& ruled,
                                            const std::vector<bool>& in_fp32,
                                            const std::vector<bool>& by_row, ScalarType type) {
    const auto check = [&](const std::vector<bool>& marks, const std::string& of) {
      if (!marks.empty() && marks.size() != params.size()) {
        throw InvalidArgument("there are " + std::to_string(params.size()) + " parameters and " +
                              std::to_string(marks.size()) + " marks of what " + of);
      }
    };
    check(ruled, "the rule updates");
    check(in_fp32, "is float32");
    check(by_row, "is read by the row");
    std::vector<ParamSpec> specs;
    for (const auto& [name, numel, trainable] : params) {
      const std::size_t i = specs.size();
      specs.push_back({name, numel, !in_fp32.empty() && in_fp32[i] ? ScalarType::kFloat32 : type,
                       trainable, ruled.empty() || ruled[i], !by_row.empty() && by_row[i]});
    }
    return specs;
  }

  /// Bytes of device memory for the share of the updates that runs there.
  [[nodiscard]] std::size_t ring_bytes(const py::dict& options) const {
    const bool shared = options["device_update_fraction"].cast<double>() > 0.0;
    return shared ? DeviceUpdates::ring_bytes(layout_, *rule_) : 0;
  }

  /// Bytes of device memory in which gradients gather until the ranks have reduced them.
  [[nodiscard]] std::size_t buffer_bytes(const py::dict& options,
                                         const std::vector<Placement>& placements) const {
    if (options["gathering_ranks"].cast<std::uint64_t>() <= 1) {
      return 0;
    }
    std::vector<bool> gathers(placements.size());
    for (std::size_t i = 0; i < gathers.size(); ++i) {
      gathers[i] = layout_.chunks()[i].trainable && placements[i] != Placement::kDevice;
    }
    return DeviceGradients::buffers(layout_, gathers).total_bytes();
  }

  [[nodiscard]] OptimizerCost optimizer_cost(const py::dict& options) const {
    const auto overlap = options["overlap"].cast<Overlap>();
    if (overlap == Overlap::kBackward) {
      throw InvalidArgument("overlap 'backward' is not simulated; there are 'none' and 'forward'");
    }
    // Each rank has one part of the states, and updates that.
    const double share = 1.0 / options["num_ranks"].cast<double>();
    const auto element = static_cast<double>(size_of(type_));
    const double state = state_bytes_per_element(type_, *rule_);
    return {.state_bytes_per_element = share * state,
            .moved_bytes_per_element = share * (2.0 * state + 3.0 * element),
            .written_bytes_per_element = share * (state + element),
            .device_update_fraction = options["device_update_fraction"].cast<double>(),
            .norm_bytes_per_element = options["with_norm"].cast<bool>() ? element : 0.0,
            .overlap = overlap};
  }

  [[nodiscard]] py::dict figures(const SimulatedStep& step, const Prediction& streamed,
                                 std::size_t num_resident) const {
    py::dict busy;
    for (std::size_t i = 0; i < kNumResources; ++i) {
      busy[py::str(std::string(to_string(static_cast<Resource>(i))))] = step.busy_seconds[i];
    }
    py::dict result;
    result["step_seconds"] = step.step_seconds;
    result["passes_seconds"] = step.passes_seconds;
    result["busy_seconds"] = busy;
    result["bound"] = std::string(to_string(step.bound));
    result["peak_device_bytes"] = step.peak_device_bytes;
    result["h2d_bytes"] = step.h2d_bytes;
    result["d2h_bytes"] = step.d2h_bytes;
    result["demand_fetches"] = step.demand_fetches;
    result["evictions"] = step.evictions;
    result["num_resident"] = num_resident;
    result["smallest_budget_bytes"] = streamed.smallest_budget_bytes;
    result["smallest_budget_module"] = layout_.module(streamed.smallest_budget_module).name;
    return result;
  }

  ScalarType type_;
  std::shared_ptr<const UpdateRule> rule_;
  ChunkLayout layout_;
};

/// (stage, micro-batch, which pass).
using PythonOp = std::tuple<std::uint32_t, std::uint32_t, PipelinePass>;

Pipeline pipeline(PipelineStyle style, std::uint32_t num_ranks, std::uint32_t stages_per_rank,
                  std::uint32_t num_microbatches) {
  return {.style = style,
          .num_ranks = num_ranks,
          .stages_per_rank = stages_per_rank,
          .num_microbatches = num_microbatches};
}

void bind_pipelines(py::module_& m) {
  m.def(
      "pipeline_order",
      [](PipelineStyle style, std::uint32_t num_ranks, std::uint32_t stages_per_rank,
         std::uint32_t num_microbatches, std::uint32_t rank) {
        std::vector<PythonOp> order;
        for (const PipelineOp& op :
             pipeline_order(pipeline(style, num_ranks, stages_per_rank, num_microbatches), rank)) {
          order.emplace_back(op.stage, op.microbatch, op.pass);
        }
        return order;
      },
      py::arg("style"), py::arg("num_ranks"), py::arg("stages_per_rank"),
      py::arg("num_microbatches"), py::arg("rank"));
  m.def(
      "pipeline_seconds",
      [](PipelineStyle style, std::uint32_t num_ranks, std::uint32_t stages_per_rank,
         std::uint32_t num_microbatches,
         const std::vector<std::tuple<double, double, double, double>>& stages) {
        std::vector<StageSeconds> seconds;
        for (const auto& [forward, backward, transfer, of_weights] : stages) {
          seconds.push_back({forward, backward, transfer, of_weights});
        }
        return pipeline_seconds(pipeline(style, num_ranks, stages_per_rank, num_microbatches),
                                seconds);
      },
      py::arg("style"), py::arg("num_ranks"), py::arg("stages_per_rank"),
      py::arg("num_microbatches"), py::arg("stages"));
}

/// The members of a RecomputedSpan, in their order.
using PythonSpan =
    std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::uint64_t, std::uint64_t,
               std::uint64_t, std::size_t, std::size_t, std::uint64_t>;

std::pair<std::vector<PythonEvent>, std::vector<double>> keep(
    const std::vector<PythonEvent>& events, std::vector<double> compute_seconds,
    const std::vector<PythonSpan>& spans) {
  std::vector<RecomputedSpan> kept;
  for (const auto& [begin, end, again_begin, again_end, base, again_base, bytes, away_begin,
                    away_end, input] : spans) {
    kept.push_back(
        {begin, end, again_begin, again_end, base, again_base, bytes, away_begin, away_end, input});
  }
  RecordedStep step = keep_activations(
      {.events = trace_of(events).events(), .compute_seconds = std::move(compute_seconds)}, kept);
  return {events_of(step.events), std::move(step.compute_seconds)};
}

}  // namespace

void bind_simulator(py::module_& m) {
  bind_pipelines(m);
  m.def("keep_activations", &keep, py::arg("events"), py::arg("compute_seconds"), py::arg("kept"));
  py::class_<Simulator>(m, "Simulator")
      .def(py::init<const std::vector<PythonParamSpec>&, const std::vector<PythonModuleSpec>&,
                    ScalarType, std::size_t, StateFormat, std::size_t, const std::vector<bool>&,
                    const std::string&, const std::vector<bool>&, const std::vector<bool>&>(),
           py::arg("params"), py::arg("modules"), py::arg("precision"), py::arg("chunk_bytes"),
           py::arg("state_format"), py::arg("num_ranks") = 1,
           py::arg("ruled") = std::vector<bool>(), py::arg("rule") = "adam",
           py::arg("in_fp32") = std::vector<bool>(), py::arg("by_row") = std::vector<bool>())
      .def("follow", &Simulator::follow, py::arg("params"), py::arg("tell"))
      .def_property_readonly("chunks", &Simulator::chunks)
      .def_property_readonly("gradient_buffer_bytes", &Simulator::gradient_buffer_bytes)
      .def("places", &Simulator::places, py::arg("options"))
      .def("run", &Simulator::run, py::arg("events"), py::arg("compute_seconds"),
           py::arg("options"));
}

}  // namespace castor
