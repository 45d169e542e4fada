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
  const bool folded = pipeline.style == PipelineStyle::kZbv;
  if (folded && pipeline.stages_per_rank != 2) {
    throw InvalidArgument("a rank has two stages on a V, not " +
                          std::to_string(pipeline.stages_per_rank));
  }
  if (!interleaved && !folded && pipeline.stages_per_rank > 1) {
    throw InvalidArgument("a rank has several stages where they are interleaved or on a V only");
  }
  if (interleaved && pipeline.num_microbatches % pipeline.num_ranks != 0) {
    throw InvalidArgument("interleaved stages take a multiple of " +
                          std::to_string(pipeline.num_ranks) + " micro-batches, not " +
                          std::to_string(pipeline.num_microbatches));
  }
}

std::uint32_t rank_of(const Pipeline& pipeline, std::uint32_t stage) {
  const bool back = pipeline.style == PipelineStyle::kZbv && stage >= pipeline.num_ranks;
  return back ? 2 * pipeline.num_ranks - 1 - stage : stage % pipeline.num_ranks;
}

std::vector<PipelineOp> all_forwards_first(const Pipeline& pipeline, std::uint32_t rank) {
  std::vector<PipelineOp> order;
  for (const PipelinePass pass : {PipelinePass::kForward, PipelinePass::kBackward}) {
    for (std::uint32_t i = 0; i < pipeline.num_microbatches; ++i) {
      order.push_back({rank, i, pass});
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
      add(i, PipelinePass::kForward);
    }
    for (std::uint32_t i = ahead; i < total; ++i) {
      add(i, PipelinePass::kForward);
      add(i - ahead, PipelinePass::kBackward);
    }
    for (std::uint32_t i = total - ahead; i < total; ++i) {
      add(i, PipelinePass::kBackward);
    }
    return order_;
  }

 private:
  /// The i-th forward, or backward, of the rank: stages take turns of as many micro-batches as
  /// there are ranks.
  void add(std::uint32_t i, PipelinePass pass) {
    const std::uint32_t each = pipeline_.num_ranks;
    const std::uint32_t stages = pipeline_.stages_per_rank;
    std::uint32_t turn = stages == 1 ? 0 : i / each % stages;
    const std::uint32_t microbatch = stages == 1 ? i : i / (each * stages) * each + i % each;
    if (pass == PipelinePass::kBackward) {
      turn = stages - 1 - turn;
    }
    order_.push_back({turn * pipeline_.num_ranks + rank_, microbatch, pass});
  }

  const Pipeline& pipeline_;
  std::uint32_t rank_;
  std::vector<PipelineOp> order_;
};

/// Two stages a rank, on the way there and on the way back (Qi et al. 2023, section 6): forwards
/// until the first micro-batch has been through all stages, then a forward, and the two halves of
/// a backward, of each of the two in turn, and at the end the weights that are left.
class OnV {
 public:
  OnV(const Pipeline& pipeline, std::uint32_t rank)
      : num_microbatches_(pipeline.num_microbatches),
        num_ranks_(pipeline.num_ranks),
        rank_(rank),
        there_{.stage = rank},
        back_{.stage = 2 * pipeline.num_ranks - 1 - rank} {}

  std::vector<PipelineOp> order() {
    // The order is that of so many; those that there are not are left out of it.
    const std::uint32_t count = std::max(2 * num_ranks_ - 1, num_microbatches_);
    const std::uint32_t behind = num_ranks_ - rank_;
    times(2 * behind - 1, [&] { forward(there_); });
    times(rank_, [&] {
      forward(back_);
      forward(there_);
    });
    times(behind, [&] {
      forward(back_);
      backward(back_);
    });
    while (back_.forwards < there_.forwards || there_.forwards < count) {
      if (there_.forwards < count) {
        forward(there_);
      }
      backward(there_);
      forward(back_);
      backward(back_);
    }
    times(rank_, [&] {
      of_inputs(there_);
      of_inputs(back_);
    });
    times(behind, [&] {
      of_inputs(there_);
      of_weights(there_);
    });
    times(back_.of_inputs - back_.of_weights, [&] { of_weights(back_); });
    times(there_.of_inputs - there_.of_weights, [&] { of_weights(there_); });
    return order_;
  }

 private:
  /// A stage, and how many micro-batches have had which pass.
  struct Stage {
    std::uint32_t stage = 0;
    std::uint32_t forwards = 0;
    std::uint32_t of_inputs = 0;
    std::uint32_t of_weights = 0;
  };

  static void times(std::uint32_t count, const auto& work) {
    for (std::uint32_t i = 0; i < count; ++i) {
      work();
    }
  }

  void forward(Stage& of) { add(of.stage, of.forwards++, PipelinePass::kForward); }
  void of_inputs(Stage& of) { add(of.stage, of.of_inputs++, PipelinePass::kOfInputs); }
  void of_weights(Stage& of) { add(of.stage, of.of_weights++, PipelinePass::kOfWeights); }
  void backward(Stage& of) {
    of_inputs(of);
    of_weights(of);
  }
  void add(std::uint32_t stage, std::uint32_t microbatch, PipelinePass pass) {
    if (microbatch < num_microbatches_) {
      order_.push_back({stage, microbatch, pass});
    }
  }

  std::uint32_t num_microbatches_;
  std::uint32_t num_ranks_;
  std::uint32_t rank_;
  Stage there_;
  Stage back_;
  std::vector<PipelineOp> order_;
};

/// When what is through which stage.
class StageClock {
 public:
  StageClock(const Pipeline& pipeline, std::span<const StageSeconds> stages)
      : pipeline_(pipeline),
        stages_(stages),
        done_(2 * stages.size() * pipeline.num_microbatches, kNotYet),
        free_at_(pipeline.num_ranks, 0.0) {}

  /// Runs an op if what it needs is known; says whether.
  bool run(const PipelineOp& op, std::uint32_t rank) {
    const double ready = ready_at(op);
    if (ready == kNotYet) {
      return false;
    }
    double& clock = free_at_[rank];
    clock = std::max(clock, ready) + seconds_of(op);
    if (op.pass != PipelinePass::kOfWeights) {  // which nobody waits for
      done_[at(op.stage, op.microbatch, op.pass)] = clock;
    }
    return true;
  }

  [[nodiscard]] double end() const { return *std::max_element(free_at_.begin(), free_at_.end()); }

 private:
  /// The gradients of a stage's inputs are there after a whole backward and after its first half.
  [[nodiscard]] std::size_t at(std::size_t stage, std::uint32_t microbatch,
                               PipelinePass pass) const {
    return (pass == PipelinePass::kForward ? 0 : done_.size() / 2) +
           stage * pipeline_.num_microbatches + microbatch;
  }

  [[nodiscard]] double seconds_of(const PipelineOp& op) const {
    const StageSeconds& stage = stages_[op.stage];
    switch (op.pass) {
      case PipelinePass::kForward: return stage.forward;
      case PipelinePass::kBackward: return stage.backward;
      case PipelinePass::kOfInputs: return stage.backward - stage.of_weights;
      case PipelinePass::kOfWeights: return stage.of_weights;
    }
    return 0.0;
  }

  [[nodiscard]] double ready_at(const PipelineOp& op) const {
    const auto done = [&](std::uint32_t stage, PipelinePass pass) {
      const bool sent = rank_of(pipeline_, stage) != rank_of(pipeline_, op.stage);
      return done_[at(stage, op.microbatch, pass)] + (sent ? stages_[stage].transfer : 0.0);
    };
    if (op.pass == PipelinePass::kForward) {
      return op.stage == 0 ? 0.0 : done(op.stage - 1, op.pass);
    }
    if (op.pass == PipelinePass::kOfWeights) {
      return done(op.stage, op.pass);  // behind those of inputs
    }
    const bool last = op.stage + 1 == stages_.size();
    return last ? done(op.stage, PipelinePass::kForward) : done(op.stage + 1, op.pass);
  }

  const Pipeline& pipeline_;
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
  switch (pipeline.style) {
    case PipelineStyle::kGpipe: return all_forwards_first(pipeline, rank);
    case PipelineStyle::kZbv: return OnV(pipeline, rank).order();
    case PipelineStyle::k1f1b:
    case PipelineStyle::kInterleaved: break;
  }
  return InTurn(pipeline, rank).order();
}

double pipeline_seconds(const Pipeline& pipeline, std::span<const StageSeconds> stages) {
  check(pipeline);
  if (stages.size() != std::size_t{pipeline.num_ranks} * pipeline.stages_per_rank) {
    throw InvalidArgument(
        "there are seconds of " + std::to_string(stages.size()) + " stages, and " +
        std::to_string(pipeline.num_ranks * pipeline.stages_per_rank) + " stages");
  }
  for (const StageSeconds& stage : stages) {
    for (const double seconds : {stage.forward, stage.backward, stage.transfer, stage.of_weights}) {
      if (!std::isfinite(seconds) || seconds < 0.0) {
        throw InvalidArgument("a stage takes " + std::to_string(seconds) + " seconds");
      }
    }
    if (stage.of_weights > stage.backward) {
      throw InvalidArgument("of a backward of " + std::to_string(stage.backward) + " seconds " +
                            std::to_string(stage.of_weights) + " are those of weights");
    }
  }
  std::vector<std::vector<PipelineOp>> orders;
  for (std::uint32_t rank = 0; rank < pipeline.num_ranks; ++rank) {
    orders.push_back(pipeline_order(pipeline, rank));
  }
  StageClock clock(pipeline, stages);
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
