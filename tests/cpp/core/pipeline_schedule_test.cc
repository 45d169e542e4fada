#include "core/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <tuple>
#include <vector>

#include "core/error.h"

namespace castor {
namespace {

using enum PipelineStyle;
using enum PipelinePass;

std::vector<Pipeline> pipelines() {
  std::vector<Pipeline> all;
  for (const std::uint32_t ranks : {1U, 2U, 3U, 4U, 8U}) {
    for (const std::uint32_t rounds : {1U, 2U, 3U}) {
      all.push_back({k1f1b, ranks, 1, ranks * rounds});
      all.push_back({k1f1b, ranks, 1, ranks * rounds + 1});
      all.push_back({kGpipe, ranks, 1, rounds});
      all.push_back({kInterleaved, ranks, 2, ranks * rounds});
      all.push_back({kInterleaved, ranks, 3, ranks * rounds});
      all.push_back({kZbv, ranks, 2, rounds});
      all.push_back({kZbv, ranks, 2, ranks * rounds + 1});
    }
  }
  return all;
}

std::vector<StageSeconds> alike(const Pipeline& pipeline, StageSeconds seconds) {
  return std::vector<StageSeconds>(std::size_t{pipeline.num_ranks} * pipeline.stages_per_rank,
                                   seconds);
}

TEST(PipelineOrder, OneForwardOneBackward) {
  const std::vector<PipelineOp> first = pipeline_order({k1f1b, 2, 1, 3}, 0);
  EXPECT_EQ(first, (std::vector<PipelineOp>{{0, 0, kForward},
                                            {0, 1, kForward},
                                            {0, 0, kBackward},
                                            {0, 2, kForward},
                                            {0, 1, kBackward},
                                            {0, 2, kBackward}}));
}

TEST(PipelineOrder, EachMicrobatchGoesOnceThroughEachStageOfTheRankAndBack) {
  for (const Pipeline& pipeline : pipelines()) {
    const bool folded = pipeline.style == kZbv;
    for (std::uint32_t rank = 0; rank < pipeline.num_ranks; ++rank) {
      std::set<std::tuple<std::uint32_t, std::uint32_t, PipelinePass>> seen;
      for (const PipelineOp& op : pipeline_order(pipeline, rank)) {
        const bool back = folded && op.stage >= pipeline.num_ranks;
        EXPECT_EQ(back ? 2 * pipeline.num_ranks - 1 - op.stage : op.stage % pipeline.num_ranks,
                  rank);
        EXPECT_LT(op.microbatch, pipeline.num_microbatches);
        EXPECT_TRUE(seen.insert({op.stage, op.microbatch, op.pass}).second);
        EXPECT_EQ(op.pass == kOfInputs || op.pass == kOfWeights, folded && op.pass != kForward);
        if (op.pass != kForward) {
          EXPECT_TRUE(seen.contains({op.stage, op.microbatch, kForward}));
        }
        if (op.pass == kOfWeights) {
          EXPECT_TRUE(seen.contains({op.stage, op.microbatch, kOfInputs}));
        }
      }
      EXPECT_EQ(seen.size(),
                (folded ? 3 : 2) * pipeline.stages_per_rank * pipeline.num_microbatches);
    }
  }
}

TEST(PipelineOrder, WithOneForwardOneBackwardAStageHoldsAsManyMicrobatchesAsStagesFollow) {
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    std::uint32_t held = 0;
    std::uint32_t most = 0;
    for (const PipelineOp& op : pipeline_order({k1f1b, 4, 1, 16}, rank)) {
      held += op.pass == kForward ? 1U : -1U;
      most = std::max(most, held);
    }
    EXPECT_EQ(most, 4 - rank);
  }
}

// Qi et al. 2023, section 6: a rank never holds more than as many micro-batches of a model that is
// whole as one of 1F1B's first does.
TEST(PipelineOrder, OnAVARankHoldsAsMuchAsTheFirstOfOneForwardOneBackward) {
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    std::uint32_t held = 0;
    std::uint32_t most = 0;
    for (const PipelineOp& op : pipeline_order({kZbv, 4, 2, 16}, rank)) {
      if (op.pass != kOfInputs) {
        held += op.pass == kForward ? 1U : -1U;
      }
      most = std::max(most, held);
    }
    EXPECT_EQ(most, 2 * 4);
  }
}

// Narayanan et al. 2021, sections 2.2.1 and 2.2.2: the bubble is (p - 1)(f + b), and over v stages
// a rank one v-th of it.
TEST(PipelineSeconds, OfEqualStagesAreTheBubbleAndTheWork) {
  for (const Pipeline& pipeline : pipelines()) {
    if (pipeline.style == kZbv) {
      continue;
    }
    const double seconds = pipeline_seconds(pipeline, alike(pipeline, {1.0, 2.0, 0.0}));
    const double work = 3.0 * pipeline.num_microbatches * pipeline.stages_per_rank;
    EXPECT_DOUBLE_EQ(seconds, work + 3.0 * (pipeline.num_ranks - 1))
        << to_string(pipeline.style) << ", " << pipeline.num_ranks << " ranks, "
        << pipeline.num_microbatches << " micro-batches";
  }
}

// Qi et al. 2023, section 6: where the three passes take as long no rank waits, once it has begun.
TEST(PipelineSeconds, OnAVOfEqualPassesAreTheWorkAndTheWayToTheLastRank) {
  for (const std::uint32_t ranks : {1U, 2U, 3U, 4U, 8U}) {
    const Pipeline pipeline{kZbv, ranks, 2, 2 * ranks + 3};
    const double seconds = pipeline_seconds(pipeline, alike(pipeline, {1.0, 2.0, 0.0, 1.0}));
    EXPECT_DOUBLE_EQ(seconds, 6.0 * pipeline.num_microbatches + ranks - 1);
  }
}

TEST(PipelineSeconds, BetweenStagesOfOneRankNothingIsSent) {
  const Pipeline pipeline{kZbv, 2, 2, 1};
  // There and back again are two transfers each. Of stage 2 the weights' gradients are computed
  // before those of stage 1's inputs, on the same rank; of stage 0 at the end.
  EXPECT_DOUBLE_EQ(pipeline_seconds(pipeline, alike(pipeline, {1.0, 2.0, 10.0, 1.0})),
                   4 * 1.0 + 2 * 10.0 + 4 * 1.0 + 2 * 10.0 + 2 * 1.0);
}

TEST(PipelineSeconds, NoStageIsBusyForLongerAndTransfersAddToTheBubble) {
  for (const Pipeline& pipeline : pipelines()) {
    std::vector<StageSeconds> stages = alike(pipeline, {1.0, 2.0, 0.0});
    const double without = pipeline_seconds(pipeline, stages);
    for (StageSeconds& stage : stages) {
      stage.transfer = 0.25;
    }
    const double with = pipeline_seconds(pipeline, stages);
    if (pipeline.num_ranks > 1) {
      EXPECT_GT(with, without);
    }
    stages.back().forward = 4.0;
    EXPECT_GE(pipeline_seconds(pipeline, stages), std::max(with, 6.0 * pipeline.num_microbatches));
  }
}

TEST(PipelineSeconds, RefusesWhatMakesNoSense) {
  const StageSeconds stage{1.0, 1.0, 0.0};
  EXPECT_THROW((void)pipeline_order({k1f1b, 0, 1, 1}, 0), InvalidArgument);
  EXPECT_THROW((void)pipeline_order({k1f1b, 2, 1, 0}, 0), InvalidArgument);
  EXPECT_THROW((void)pipeline_order({k1f1b, 2, 2, 2}, 0), InvalidArgument);
  EXPECT_THROW((void)pipeline_order({k1f1b, 2, 1, 2}, 2), InvalidArgument);
  EXPECT_THROW((void)pipeline_order({kInterleaved, 2, 2, 3}, 0), InvalidArgument);
  EXPECT_THROW((void)pipeline_order({kZbv, 2, 1, 2}, 0), InvalidArgument);
  EXPECT_THROW((void)pipeline_seconds({k1f1b, 2, 1, 2}, std::vector{stage}), InvalidArgument);
  const StageSeconds endless{std::numeric_limits<double>::infinity(), 1.0, 0.0};
  EXPECT_THROW((void)pipeline_seconds({k1f1b, 1, 1, 1}, std::vector{endless}), InvalidArgument);
  const StageSeconds more_than_all{1.0, 1.0, 0.0, 2.0};
  EXPECT_THROW((void)pipeline_seconds({k1f1b, 1, 1, 1}, std::vector{more_than_all}),
               InvalidArgument);
}

}  // namespace
}  // namespace castor
