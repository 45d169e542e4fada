#include "core/hybrid_placement.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {
namespace {

/// One choice: a growing set of promoted chunks, and the planner as the judge of it.
class Choice {
 public:
  Choice(const Trace& trace, const ChunkLayout& layout, std::span<const Placement> placements,
         std::span<const std::size_t> device_bytes, const HybridOptions& options)
      : trace_(trace),
        layout_(layout),
        placements_(placements.begin(), placements.end()),
        device_bytes_(device_bytes),
        options_(options.plan),
        runs_left_(std::clamp(kMaxPlannedAccesses / std::max<std::size_t>(1, trace.num_accesses()),
                              kMinPlannerRuns, kMaxPlannerRuns)),
        streamed_(make_plan(trace, layout, placements_, options_).prediction()) {
    const std::size_t taken = options_.fixed_device_bytes + trace.peak_nonmodel_bytes();
    const std::size_t left =
        options_.device_budget_bytes > taken ? options_.device_budget_bytes - taken : 0;
    limit_ = static_cast<std::size_t>(static_cast<double>(left) * options.margin_ratio);
  }

  [[nodiscard]] bool feasible() const { return within_budget(streamed_); }

  Promotions run(std::vector<ChunkId> wanted) {
    while (!wanted.empty() && runs_left_ > 0) {
      const std::size_t count = longest_passing_prefix(wanted);
      for (std::size_t i = 0; i < count; ++i) {
        promote(wanted[i]);
      }
      // The one after it is too much, by itself or for the plan; a smaller one may not be.
      const std::size_t tried = std::min(count + 1, wanted.size());
      wanted.erase(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(tried));
    }
    return std::move(chosen_);
  }

 private:
  [[nodiscard]] bool within_budget(const Prediction& prediction) const {
    return std::max(prediction.peak_device_bytes, prediction.smallest_budget_bytes) <=
           options_.device_budget_bytes;
  }

  std::size_t longest_passing_prefix(const std::vector<ChunkId>& wanted) {
    std::size_t fits = 0;
    for (std::size_t bytes = chosen_.bytes; fits < wanted.size(); ++fits) {
      bytes += device_bytes_[index(wanted[fits])];
      if (bytes > limit_) {
        break;
      }
    }
    // Passing is all but monotonic: what the search ends at has passed, longer ones mostly not.
    std::size_t passes = 0;
    std::size_t probe = fits;
    while (passes < fits && runs_left_ > 0) {
      if (no_worse(std::span(wanted).first(probe))) {
        passes = probe;
      } else {
        fits = probe - 1;
      }
      probe = passes + (fits - passes + 1) / 2;
    }
    return passes;
  }

  bool no_worse(std::span<const ChunkId> more) {
    --runs_left_;
    std::vector<Placement> placements = placements_;
    PlanOptions options = options_;
    options.fixed_device_bytes += chosen_.bytes;
    for (const ChunkId chunk : more) {
      placements[index(chunk)] = Placement::kDevice;
      options.fixed_device_bytes += device_bytes_[index(chunk)];
    }
    const Plan plan = make_plan(trace_, layout_, placements, options);
    const Prediction& prediction = plan.prediction();
    return within_budget(prediction) && prediction.h2d_bytes <= streamed_.h2d_bytes &&
           prediction.demand_fetches <= streamed_.demand_fetches;
  }

  void promote(ChunkId chunk) {
    placements_[index(chunk)] = Placement::kDevice;
    chosen_.bytes += device_bytes_[index(chunk)];
    chosen_.chunks.push_back(chunk);
  }

  const Trace& trace_;
  const ChunkLayout& layout_;
  std::vector<Placement> placements_;  // with what is chosen
  const std::span<const std::size_t> device_bytes_;
  const PlanOptions options_;
  std::size_t runs_left_;
  const Prediction streamed_;  // of the plan without promotions
  std::size_t limit_ = 0;
  Promotions chosen_;
};

/// Those whose gradients arrive last, then those that are used but get no gradient.
std::vector<ChunkId> in_order_of_preference(const Trace& trace, const ChunkLayout& layout,
                                            std::span<const Placement> placements,
                                            const std::vector<bool>& candidates) {
  const std::size_t count = layout.chunks().size();
  std::vector<bool> open(count, false);
  for (std::size_t i = 0; i < count; ++i) {
    open[i] =
        candidates[i] && placements[i] == Placement::kStream && !layout.chunks()[i].read_on_host;
  }
  std::vector<ChunkId> order;
  const auto take = [&](ChunkId chunk) {
    if (open[index(chunk)]) {
      open[index(chunk)] = false;
      order.push_back(chunk);
    }
  };
  const auto& events = trace.events();
  for (auto event = events.rbegin(); event != events.rend(); ++event) {
    if (event->kind == EventKind::kGradReady) {
      if (event->id >= count) {
        throw InvalidArgument("the trace names chunk " + std::to_string(event->id) + " of " +
                              std::to_string(count) + "; it was recorded for another model");
      }
      take(ChunkId{event->id});
    }
  }
  for (const Event& event : events) {
    if (event.is_access()) {
      for (const ChunkId chunk : layout.chunks_of(ModuleId{event.id})) {
        take(chunk);
      }
    }
  }
  return order;
}

}  // namespace

Promotions choose_promotions(const Trace& trace, const ChunkLayout& layout,
                             std::span<const Placement> placements,
                             std::span<const std::size_t> device_bytes,
                             const std::vector<bool>& candidates, const HybridOptions& options) {
  const std::size_t count = layout.chunks().size();
  if (placements.size() != count || device_bytes.size() != count || candidates.size() != count) {
    throw InvalidArgument("there are " + std::to_string(count) + " chunks but " +
                          std::to_string(placements.size()) + " placements, " +
                          std::to_string(device_bytes.size()) + " sizes and " +
                          std::to_string(candidates.size()) + " candidate entries");
  }
  if (!(options.margin_ratio >= 0.0 && options.margin_ratio <= 1.0)) {
    throw InvalidArgument("gpu_margin_mem_ratio is " + std::to_string(options.margin_ratio) +
                          "; it must lie in [0, 1]");
  }
  if (options.plan.policy != PlacementPolicy::kAuto || options.margin_ratio == 0.0) {
    return {};
  }
  Choice choice(trace, layout, placements, device_bytes, options);
  if (!choice.feasible()) {
    return {};
  }
  return choice.run(in_order_of_preference(trace, layout, placements, candidates));
}

}  // namespace castor
