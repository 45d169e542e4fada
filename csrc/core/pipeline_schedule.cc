#include "core/pipeline_schedule.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <string>

#include "core/error.h"

namespace castor {
namespace {

constexpr double kNotYet = std::numeric_limits<double>::infinity();

void check(const Pipeline& pipeline) {
  if (pipeline.num_ranks == 0 || pipeline.stages_per_rank == 0 || pipeline.num_microbatches == 0) {
    throw InvalidArgument("a pipeline has one rank, stage and micro-batch at least; there are " +
                          std::to_string(pipeline.num_ranks) + ", " +
                          std::to_string(pipeline.stages_per_rank) + " and " +
                          std::to_string(pipeline.num_microbatches));
  }
  const bool interleaved = pipeline.style == PipelineStyle::kInterleaved;
  if (!interleaved && pipeline.stages_per_rank > 1) {
    throw InvalidArgument("a rank has several stages where they are interleaved only");
  }
  if (interleaved && pipeline.num_microbatches % pipeline.num_ranks != 0) {
    throw InvalidArgument("interleaved stages take a multiple of " +
                          std::to_string(pipeline.num_ranks) + " micro-batches, not " +
                          std::to_string(pipeline.num_microbatches));
  }
}

std::vector<PipelineOp> all_forwards_first(const Pipeline& pipeline, std::uint32_t rank) {
  std::vector<PipelineOp> order;
  for (const bool backward : {false, true}) {
    for (std::uint32_t i = 0; i < pipeline.num_microbatches; ++i) {
      order.push_back({rank, i, backward});
    }
  }
  return order;
}

/// 1F1B, over one stage a rank or several: `ahead` forwards, then a forward and a backward in
/// turn, and at the end the backwards that are left.
class InTurn {
 public:
  InTurn(const Pipeline& pipeline, std::uint32_t rank) : pipeline_(pipeline), rank_(rank) {}

  std::vector<PipelineOp> order() {
    const std::uint32_t total = pipeline_.stages_per_rank * pipeline_.num_microbatches;
    const std::uint32_t behind = pipeline_.num_ranks - 1 - rank_;
    const std::uint32_t ahead =
        std::min(total, pipeline_.style == PipelineStyle::kInterleaved
                            ? (pipeline_.stages_per_rank - 1) * pipeline_.num_ranks + 2 * behind
                            : behind);
    for (std::uint32_t i = 0; i < ahead; ++i) {
      add(i, false);
    }
    for (std::uint32_t i = ahead; i < total; ++i) {
      add(i, false);
      add(i - ahead, true);
    }
    for (std::uint32_t i = total - ahead; i < total; ++i) {
      add(i, true);
    }
    return order_;
  }

 private:
  /// The i-th forward, or backward, of the rank: stages take turns of as many micro-batches as
  /// there are ranks.
  void add(std::uint32_t i, bool backward) {
    const std::uint32_t each = pipeline_.num_ranks;
    const std::uint32_t stages = pipeline_.stages_per_rank;
    std::uint32_t turn = stages == 1 ? 0 : i / each % stages;
    const std::uint32_t microbatch = stages == 1 ? i : i / (each * stages) * each + i % each;
    if (backward) {
      turn = stages - 1 - turn;
    }
    order_.push_back({turn * pipeline_.num_ranks + rank_, microbatch, backward});
  }

  const Pipeline& pipeline_;
  std::uint32_t rank_;
  std::vector<PipelineOp> order_;
};

/// When what is through which stage.
class Clock {
 public:
  Clock(const Pipeline& pipeline, std::span<const StageSeconds> stages)
      : microbatches_(pipeline.num_microbatches),
        stages_(stages),
        done_(2 * stages.size() * microbatches_, kNotYet),
        free_at_(pipeline.num_ranks, 0.0) {}

  /// Runs an op if what it needs is known; says whether.
  bool run(const PipelineOp& op, std::uint32_t rank) {
    const double ready = ready_at(op);
    if (ready == kNotYet) {
      return false;
    }
    const StageSeconds& stage = stages_[op.stage];
    double& clock = free_at_[rank];
    clock = std::max(clock, ready) + (op.backward ? stage.backward : stage.forward);
    done_[at(op)] = clock;
    return true;
  }

  [[nodiscard]] double end() const { return *std::max_element(free_at_.begin(), free_at_.end()); }

 private:
  [[nodiscard]] std::size_t at(const PipelineOp& op) const {
    return (op.backward ? done_.size() / 2 : 0) + op.stage * microbatches_ + op.microbatch;
  }

  [[nodiscard]] double ready_at(const PipelineOp& op) const {
    PipelineOp before = op;
    if (!op.backward) {
      if (op.stage == 0) {
        return 0.0;
      }
      --before.stage;
    } else if (op.stage + 1 == stages_.size()) {
      before.backward = false;
      return done_[at(before)];
    } else {
      ++before.stage;
    }
    return done_[at(before)] + stages_[before.stage].transfer;
  }

  std::size_t microbatches_;
  std::span<const StageSeconds> stages_;
  std::vector<double> done_;     // forwards, then backwards, by stage and micro-batch
  std::vector<double> free_at_;  // by rank
};

}  // namespace

std::vector<PipelineOp> pipeline_order(const Pipeline& pipeline, std::uint32_t rank) {
  check(pipeline);
  if (rank >= pipeline.num_ranks) {
    throw InvalidArgument("rank " + std::to_string(rank) + " is none of " +
                          std::to_string(pipeline.num_ranks));
  }
  return pipeline.style == PipelineStyle::kGpipe ? all_forwards_first(pipeline, rank)
                                                 : InTurn(pipeline, rank).order();
}

double pipeline_seconds(const Pipeline& pipeline, std::span<const StageSeconds> stages) {
  check(pipeline);
  if (stages.size() != std::size_t{pipeline.num_ranks} * pipeline.stages_per_rank) {
    throw InvalidArgument(
        "there are seconds of " + std::to_string(stages.size()) + " stages, and " +
        std::to_string(pipeline.num_ranks * pipeline.stages_per_rank) + " stages");
  }
  for (const StageSeconds& stage : stages) {
    for (const double seconds : {stage.forward, stage.backward, stage.transfer}) {
      if (!std::isfinite(seconds) || seconds < 0.0) {
        throw InvalidArgument("a stage takes " + std::to_string(seconds) + " seconds");
      }
    }
  }
  std::vector<std::vector<PipelineOp>> orders;
  for (std::uint32_t rank = 0; rank < pipeline.num_ranks; ++rank) {
    orders.push_back(pipeline_order(pipeline, rank));
  }
  Clock clock(pipeline, stages);
  std::vector<std::size_t> next(orders.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::uint32_t rank = 0; rank < pipeline.num_ranks; ++rank) {
      while (next[rank] < orders[rank].size() && clock.run(orders[rank][next[rank]], rank)) {
        ++next[rank];
        moved = true;
      }
    }
  }
  assert(std::ranges::equal(next, orders, {}, {}, [](const auto& order) { return order.size(); }));
  return clock.end();
}

}  // namespace castor
