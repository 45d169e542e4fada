// Question: how long does planning a step take, and how does that grow with the step's length?
// Baseline: none; the target is 1,000,000 accesses in under 1 s, and growth no worse than n log n.
// Method: castor::make_plan over made-up traces of a chain of modules of two parameters: forward
//     enter and exit of each, then their backward enters in reverse, with activations that pile up
//     in forward and go in backward. Layout and trace are made before the clock starts.
//     "deep": as many modules as the length asks for, 8 accesses a chunk, one pass: the step of a
//         longer and longer model.
//     "wide": a fixed number of chunks, run over again and again: the micro-batches of one step.
//
//   planner ACCESSES REPETITIONS SHAPE CHUNKS POLICY SHARE PREFETCH  prints one JSON object.
//     SHAPE deep | wide; CHUNKS counts for wide only; POLICY auto | cpu | static; SHARE of the
//     chunks' bytes that fit beside the activations; PREFETCH is PlanOptions::max_prefetch.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_layout.h"
#include "core/placement.h"
#include "core/planner.h"
#include "core/trace.h"

namespace {

using castor::ChunkLayout;
using castor::Event;
using castor::EventKind;
using castor::ModuleId;
using castor::ParamId;
using castor::PlacementPolicy;

constexpr std::size_t kModulesPerChunk = 4;
constexpr std::size_t kParamBytes = 256;  // of a slot: a whole number of alignments
constexpr std::size_t kChunkBytes = 2 * kModulesPerChunk * kParamBytes;
/// Activations of a module, in bytes: of a thousand modules as much as of 125 chunks.
constexpr std::uint64_t kActivationBytes = 256;

struct Arguments {
  std::size_t accesses;
  std::size_t repetitions;
  std::string shape;
  std::size_t chunks;
  std::string policy;
  double share;
  std::size_t prefetch;
};

ChunkLayout make_layout(std::size_t num_modules) {
  std::vector<castor::ParamSpec> params;
  std::vector<castor::ModuleSpec> modules{{"model", {}, std::nullopt}};
  params.reserve(2 * num_modules);
  modules.reserve(num_modules + 1);
  for (std::uint32_t i = 0; i < num_modules; ++i) {
    params.push_back({"w", kParamBytes / sizeof(float)});
    params.push_back({"b", kParamBytes / sizeof(float)});
    modules.push_back({"m", {ParamId{2 * i}, ParamId{2 * i + 1}}, ModuleId{0}});
  }
  return {std::move(params), std::move(modules), {.chunk_bytes = kChunkBytes}};
}

castor::Trace make_trace(std::size_t num_modules, std::size_t num_passes) {
  std::vector<Event> events;
  events.reserve(num_passes * (3 * num_modules + 2));
  const auto add = [&](EventKind kind, std::size_t module, std::size_t depth) {
    events.push_back({kind, static_cast<std::uint32_t>(module), depth * kActivationBytes, 0});
  };
  for (std::size_t pass = 0; pass < num_passes; ++pass) {
    add(EventKind::kForwardEnter, 0, 0);
    for (std::size_t i = 1; i <= num_modules; ++i) {
      add(EventKind::kForwardEnter, i, i);
      add(EventKind::kForwardExit, i, i);
    }
    add(EventKind::kForwardExit, 0, num_modules);
    for (std::size_t i = num_modules; i > 0; --i) {
      add(EventKind::kBackwardEnter, i, i);
    }
  }
  return castor::Trace(std::move(events));
}

std::optional<castor::PlacementOptions> placement_of(const std::string& policy) {
  if (policy == "auto") {
    return castor::PlacementOptions{};
  }
  if (policy == "cpu") {
    return castor::PlacementOptions{.policy = PlacementPolicy::kCpu};
  }
  if (policy == "static") {
    return castor::PlacementOptions{
        .policy = PlacementPolicy::kStatic, .offload_optim_frac = 1.0, .offload_param_frac = 0.9};
  }
  return std::nullopt;
}

std::optional<Arguments> parse(int argc, char** argv) {
  if (argc != 8) {
    return std::nullopt;
  }
  const auto count = [&](int i) { return static_cast<std::size_t>(std::atoll(argv[i])); };
  Arguments parsed{count(1), count(2), argv[3], count(4), argv[5], std::atof(argv[6]), count(7)};
  const bool shape_known = parsed.shape == "deep" || (parsed.shape == "wide" && parsed.chunks > 0);
  if (parsed.accesses < 16 || parsed.repetitions < 1 || !shape_known || !(parsed.share > 0)) {
    return std::nullopt;
  }
  return parsed;
}

bool equal(const castor::Prediction& a, const castor::Prediction& b) {
  return a.peak_device_bytes == b.peak_device_bytes && a.h2d_bytes == b.h2d_bytes &&
         a.demand_fetches == b.demand_fetches && a.prefetches == b.prefetches &&
         a.evictions == b.evictions;
}

int measure(const Arguments& arguments, const castor::PlacementOptions& placement) {
  const std::size_t num_modules =
      arguments.shape == "deep" ? arguments.accesses / 2 : kModulesPerChunk * arguments.chunks;
  const std::size_t num_passes = 1 + (arguments.accesses - 1) / (2 * num_modules);  // rounded up
  const ChunkLayout layout = make_layout(num_modules);
  const castor::Trace trace = make_trace(num_modules, num_passes);
  const auto placements = castor::place_chunks(layout, placement);
  const auto slot_bytes =
      static_cast<std::size_t>(arguments.share * static_cast<double>(layout.used_bytes()));
  const castor::PlanOptions options{.device_budget_bytes = trace.peak_nonmodel_bytes() + slot_bytes,
                                    .max_prefetch = arguments.prefetch,
                                    .policy = placement.policy};

  std::vector<double> seconds;
  std::optional<castor::Prediction> first;
  for (std::size_t i = 0; i < arguments.repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const castor::Plan plan = castor::make_plan(trace, layout, placements, options);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    // Verified after timing: a whole plan, the same each time, that keeps to a budget which fits.
    const castor::Prediction& prediction = plan.prediction();
    if (plan.accesses().size() != trace.num_accesses() ||
        prediction.smallest_budget_bytes > options.device_budget_bytes ||
        prediction.peak_device_bytes > options.device_budget_bytes ||
        (first && !equal(*first, prediction))) {
      std::fprintf(stderr, "planner: the plan is incomplete, over its budget or not the same\n");
      return 1;
    }
    first = prediction;
  }
  std::printf(
      "{\"accesses\": %zu, \"chunks\": %zu, \"passes\": %zu, \"evictions\": %llu, "
      "\"prefetches\": %llu, \"demand_fetches\": %llu, \"seconds\": [",
      trace.num_accesses(), layout.chunks().size(), num_passes,
      static_cast<unsigned long long>(first->evictions),
      static_cast<unsigned long long>(first->prefetches),
      static_cast<unsigned long long>(first->demand_fetches));
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    std::printf("%s%.6f", i == 0 ? "" : ", ", seconds[i]);
  }
  std::printf("]}\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto arguments = parse(argc, argv);
  const auto placement = arguments ? placement_of(arguments->policy) : std::nullopt;
  if (!arguments || !placement) {
    std::fprintf(stderr,
                 "usage: planner ACCESSES REPETITIONS deep|wide CHUNKS auto|cpu|static SHARE "
                 "PREFETCH\n");
    return 2;
  }
  try {
    return measure(*arguments, *placement);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "planner: %s\n", error.what());
    return 1;
  }
}
