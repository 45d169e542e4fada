// Question: how much of a module's hook cost is spent in the core, away from torch and Python?
// Baseline: none; the target is 3 us per module over forward and backward, at 10,000 modules.
// Method: drives castor::Runtime through the events of a model of small modules in one chain, two
//     parameters each, as the hooks would: enter and exit of every module, then in reverse
//     enter_backward and two grad_ready. Moving memory is a memcpy and binding costs nothing. The
//     first two steps (trace, plan) are not timed, nor is finish_step. Copies are counted in: with
//     an ample budget each chunk comes in once a step, as in training.
//
//   core_events [MODULES [STEPS [SHARE OF PARAMETERS THAT FIT]]]  prints one JSON object.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/chunk_manager.h"
#include "core/runtime.h"

namespace {

using castor::ChunkId;
using castor::ModuleId;
using castor::ParamId;
using castor::PassMode;

constexpr std::size_t kWeightNumel = 16;
constexpr std::size_t kBiasNumel = 4;

class PlainArena final : public castor::Arena {
 public:
  std::byte* allocate(std::size_t bytes) override {
    return static_cast<std::byte*>(::operator new(bytes, kAlignment));
  }
  void deallocate(std::byte* data, std::size_t /*bytes*/) noexcept override {
    ::operator delete(data, kAlignment);
  }
  std::string description() const override { return "operator new"; }

 private:
  static constexpr std::align_val_t kAlignment{4096};
};

class MemcpyEngine final : public castor::CopyEngine {
 public:
  castor::CopyTicket submit(const castor::CopyRequest& request) override {
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
    return castor::CopyTicket{++last_};
  }
  void wait(castor::CopyTicket /*ticket*/) override {}
  bool done(castor::CopyTicket /*ticket*/) override { return true; }
  bool asynchronous() const noexcept override { return false; }

 private:
  std::uint64_t last_ = 0;
};

class NoBinder final : public castor::ParamBinder {
 public:
  void bind(ChunkId /*chunk*/, std::byte* /*address*/) noexcept override {}
  void snapshot(ChunkId /*chunk*/) noexcept override {}
  bool written_since_snapshot(ChunkId /*chunk*/) const noexcept override { return false; }
  void before_write_back(ChunkId /*chunk*/, const std::byte* /*host*/,
                         const std::byte* /*slot*/) override {}
};

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

castor::ChunkLayout make_layout(std::uint32_t num_modules) {
  std::vector<castor::ParamSpec> params;
  std::vector<castor::ModuleSpec> modules{{"model", {}, std::nullopt}};
  for (std::uint32_t i = 0; i < num_modules; ++i) {
    const std::string name = "layers." + std::to_string(i);
    params.push_back({name + ".weight", kWeightNumel});
    params.push_back({name + ".bias", kBiasNumel});
    modules.push_back({name, {ParamId{2 * i}, ParamId{2 * i + 1}}, ModuleId{0}});
  }
  return {std::move(params), std::move(modules), {}};
}

struct StepTimes {
  double forward_ns = 0;
  double backward_ns = 0;
  double finish_ns = 0;
  double total_ns() const { return forward_ns + backward_ns; }
};

StepTimes run_step(castor::Runtime& runtime, std::uint32_t num_modules) {
  const std::uint64_t start = now_ns();
  runtime.enter(ModuleId{0}, PassMode::kTraining);
  for (std::uint32_t i = 0; i < num_modules; ++i) {
    runtime.enter(ModuleId{i + 1}, PassMode::kTraining);
    runtime.exit(ModuleId{i + 1});
  }
  runtime.exit(ModuleId{0});
  const std::uint64_t middle = now_ns();
  for (std::uint32_t i = num_modules; i-- > 0;) {
    runtime.enter_backward(ModuleId{i + 1});
    runtime.grad_ready(ParamId{2 * i + 1});
    runtime.grad_ready(ParamId{2 * i});
  }
  const std::uint64_t end = now_ns();
  runtime.move_to_host();
  runtime.finish_step();
  const std::uint64_t finished = now_ns();
  return {static_cast<double>(middle - start), static_cast<double>(end - middle),
          static_cast<double>(finished - end)};
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, double otherwise) {
    return argc > i ? std::atof(argv[i]) : otherwise;
  };
  const auto num_modules = static_cast<std::uint32_t>(argument(1, 10'000));
  const auto num_steps = static_cast<std::size_t>(argument(2, 51));
  const double share = argument(3, 2.0);
  if (num_modules < 1 || num_steps < 1 || !(share > 0)) {
    std::fprintf(stderr, "usage: core_events [MODULES [STEPS [SHARE]]]\n");
    return 2;
  }

  const castor::ChunkLayout layout = make_layout(num_modules);
  const auto device_bytes =
      std::max(static_cast<std::size_t>(share * static_cast<double>(layout.used_bytes())),
               2 * layout.largest_working_set_bytes());
  const auto device = std::make_shared<castor::MemoryTier>(castor::TierKind::kDevice, device_bytes,
                                                           std::make_unique<PlainArena>());
  const auto host = std::make_shared<castor::MemoryTier>(
      castor::TierKind::kHost, 2 * layout.used_bytes(), std::make_unique<PlainArena>());
  MemcpyEngine engine;
  NoBinder binder;
  castor::ChunkManager manager(layout, castor::place_chunks(layout, {}), device, host, engine,
                               binder);
  castor::Runtime runtime(manager, std::make_shared<castor::NonModelMemory>(device),
                          {.warmup_nonmodel_ratio = 0.0}, now_ns);

  for (int i = 0; i < 2; ++i) {
    run_step(runtime, num_modules);
  }
  const auto fetches_before = manager.counts().fetches;
  std::vector<double> totals;
  std::vector<double> forwards;
  std::vector<double> backwards;
  std::vector<double> finishes;
  for (std::size_t i = 0; i < num_steps; ++i) {
    const StepTimes times = run_step(runtime, num_modules);
    totals.push_back(times.total_ns() / num_modules);
    forwards.push_back(times.forward_ns / num_modules);
    backwards.push_back(times.backward_ns / num_modules);
    finishes.push_back(times.finish_ns / num_modules);
  }
  // Verified after timing: the plan was followed in every step.
  const castor::RuntimeCounts counts = runtime.counts();
  if (counts.divergent_steps != 0 || counts.plans < 1 || counts.steps != num_steps + 2) {
    std::fprintf(stderr, "core_events: the steps did not follow the plan\n");
    return 1;
  }
  const auto [least, most] = std::minmax_element(totals.begin(), totals.end());
  std::printf(
      "{\"modules\": %u, \"steps\": %zu, \"chunks\": %zu, \"fetches_per_step\": %.1f, "
      "\"ns_per_module\": {\"median\": %.1f, \"min\": %.1f, \"max\": %.1f, "
      "\"forward\": %.1f, \"backward\": %.1f, \"finish_step\": %.1f}}\n",
      num_modules, num_steps, layout.chunks().size(),
      static_cast<double>(manager.counts().fetches - fetches_before) /
          static_cast<double>(num_steps),
      median(totals), *least, *most, median(forwards), median(backwards), median(finishes));
  return 0;
}
