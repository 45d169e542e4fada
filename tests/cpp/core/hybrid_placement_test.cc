#include "core/hybrid_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <vector>

#include "core/error.h"
#include "core/fakes.h"
#include "core/steps.h"

namespace castor {
namespace {

using testing::chunk_id;
using testing::Net;
using testing::row_step;
using testing::Step;

constexpr std::size_t kSlot = Net::kChunk;
constexpr std::size_t kAll = 4 * kSlot;  // of a chunk on the device: parameters, gradients, moments

/// trace_of, with a moment for each gradient: in Net::row parameter i is chunk i.
Trace trace_with_gradients(const Step& step, const ChunkLayout& layout) {
  std::vector<Event> events;
  std::size_t next = 0;
  const Trace plain = testing::trace_of(step);
  for (const auto& act : step) {
    switch (act.kind) {
      case testing::Act::Kind::kEnter:
      case testing::Act::Kind::kExit:
      case testing::Act::Kind::kBackward: events.push_back(plain.events()[next++]); break;
      case testing::Act::Kind::kGrad: {
        const auto chunk =
            static_cast<std::uint32_t>(layout.place(testing::param_id(act.value)).chunk);
        events.push_back({EventKind::kGradReady, chunk, events.back().nonmodel_bytes, 0});
        break;
      }
      case testing::Act::Kind::kAllocate:
      case testing::Act::Kind::kFree: break;
    }
  }
  return Trace(std::move(events));
}

struct Model {
  ChunkLayout layout;
  Trace trace;
  std::vector<Placement> placements;
  std::vector<std::size_t> bytes;
  std::vector<bool> candidates;

  explicit Model(const Net& net, const Step& step)
      : layout(net.layout()),
        trace(trace_with_gradients(step, layout)),
        placements(layout.chunks().size(), Placement::kStream),
        bytes(layout.chunks().size()),
        candidates(layout.chunks().size(), true) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = 4 * layout.chunks()[i].capacity_bytes;
    }
  }

  [[nodiscard]] static HybridOptions options(std::size_t budget, double ratio = 1.0) {
    return {.plan = {.device_budget_bytes = budget}, .margin_ratio = ratio};
  }
  [[nodiscard]] Promotions choose(const HybridOptions& options) const {
    return choose_promotions(trace, layout, placements, bytes, candidates, options);
  }
  /// What the planner says of the whole.
  [[nodiscard]] Prediction predict(const Promotions& promotions, PlanOptions plan) const {
    std::vector<Placement> all = placements;
    for (const ChunkId chunk : promotions.chunks) {
      all[index(chunk)] = Placement::kDevice;
    }
    plan.fixed_device_bytes += promotions.bytes;
    return make_plan(trace, layout, all, plan).prediction();
  }
};

std::vector<std::size_t> ids(const Promotions& promotions) {
  std::vector<std::size_t> result;
  for (const ChunkId chunk : promotions.chunks) {
    result.push_back(index(chunk));
  }
  return result;
}

Model row(std::size_t count, std::size_t activation = 0) {
  return Model(Net::row(count), row_step(count, activation));
}

using Ids = std::vector<std::size_t>;

TEST(HybridPlacementTest, EverythingGoesWhereEverythingFits) {
  const Promotions promotions = row(4).choose(Model::options(4 * kAll));
  EXPECT_EQ(ids(promotions), (Ids{0, 1, 2, 3}));
  EXPECT_EQ(promotions.bytes, 4 * kAll);
}

TEST(HybridPlacementTest, TheChunksWhoseGradientsArriveLastComeFirst) {
  // Room for two whole chunks beside the four slots of the others.
  EXPECT_EQ(ids(row(6).choose(Model::options(2 * kAll + 4 * kSlot))), (Ids{0, 1}));
}

TEST(HybridPlacementTest, NothingIsPromotedAtTheCostOfMoreFetches) {
  const Model model = row(6);
  // One byte less: to promote the second would cost a slot that saves a fetch in backward, and that
  // costs no more than the second's own fetches save: none of its own are left to pay.
  const auto options = Model::options(2 * kAll + 4 * kSlot - 1);
  const Promotions promotions = model.choose(options);
  const Prediction streamed = model.predict({}, options.plan);
  const Prediction hybrid = model.predict(promotions, options.plan);
  EXPECT_LE(hybrid.h2d_bytes, streamed.h2d_bytes);
  EXPECT_LE(hybrid.demand_fetches, streamed.demand_fetches);
  EXPECT_LE(hybrid.peak_device_bytes, options.plan.device_budget_bytes);
}

TEST(HybridPlacementTest, ABudgetThatStreamingNeedsPromotesNothing) {
  EXPECT_EQ(ids(row(6).choose(Model::options(2 * kSlot))), Ids{});
}

TEST(HybridPlacementTest, AStepThatExceedsItsBudgetPromotesNothing) {
  EXPECT_EQ(ids(row(3, 1000).choose(Model::options(1000))), Ids{});
}

TEST(HybridPlacementTest, NonModelBytesKeepTheirRoom) {
  const std::size_t activations = 3 * 512;
  EXPECT_EQ(ids(row(3, 512).choose(Model::options(3 * kAll + activations))), (Ids{0, 1, 2}));
  const Promotions fewer = row(3, 512).choose(Model::options(3 * kAll + activations - 1));
  EXPECT_EQ(ids(fewer), (Ids{0, 1}));
}

TEST(HybridPlacementTest, FixedBytesKeepTheirRoom) {
  HybridOptions options = Model::options(3 * kAll + 64);
  options.plan.fixed_device_bytes = 64;
  EXPECT_EQ(ids(row(3).choose(options)), (Ids{0, 1, 2}));
  options.plan.fixed_device_bytes = 65;
  EXPECT_EQ(ids(row(3).choose(options)), (Ids{0, 1}));
}

TEST(HybridPlacementTest, TheRatioBoundsTheShareOfWhatNonModelBytesLeave) {
  const std::size_t activations = 4 * 512;
  const std::size_t budget = 8 * kAll + activations;
  EXPECT_EQ(ids(row(4, 512).choose(Model::options(budget, 0.25))), (Ids{0, 1}));
  EXPECT_EQ(ids(row(4, 512).choose(Model::options(budget, 0.375))), (Ids{0, 1, 2}));
  EXPECT_EQ(ids(row(4, 512).choose(Model::options(budget, 0.374))), (Ids{0, 1}));
  EXPECT_EQ(ids(row(4, 512).choose(Model::options(budget, 0.0))), Ids{});
}

TEST(HybridPlacementTest, OnlyCandidatesArePromoted) {
  Model model = row(4);
  model.candidates[0] = model.candidates[2] = false;
  EXPECT_EQ(ids(model.choose(Model::options(64 * kAll))), (Ids{1, 3}));
}

TEST(HybridPlacementTest, OnlyStreamedChunksArePromoted) {
  Model model = row(4);
  model.placements[1] = Placement::kKeep;
  model.placements[2] = Placement::kDevice;
  HybridOptions options = Model::options(64 * kAll);
  options.plan.fixed_device_bytes = kAll;
  EXPECT_EQ(ids(model.choose(options)), (Ids{0, 3}));
}

TEST(HybridPlacementTest, OnlyAutoPromotes) {
  for (const PlacementPolicy policy :
       {PlacementPolicy::kCpu, PlacementPolicy::kCuda, PlacementPolicy::kStatic}) {
    HybridOptions options = Model::options(64 * kAll);
    options.plan.policy = policy;
    EXPECT_EQ(ids(row(2).choose(options)), Ids{});
  }
}

TEST(HybridPlacementTest, AChunkTooLargeIsLeftOutAndTheOnesAfterItAreTried) {
  Net net;
  net.add({8 * Net::kWhole});  // arrives last, as a large embedding does
  for (int i = 0; i < 3; ++i) {
    net.add({Net::kWhole});
  }
  const Model model(net, row_step(4));
  EXPECT_EQ(ids(model.choose(Model::options(8 * kSlot + 3 * kAll))), (Ids{1, 2, 3}));
}

TEST(HybridPlacementTest, ChunksWithoutGradientsComeAfterThoseWithInOrderOfUse) {
  Net net = Net::row(4);
  net.params[0].trainable = net.params[2].trainable = false;
  Step step;
  for (const auto& act : row_step(4)) {
    if (act.kind != testing::Act::Kind::kGrad || act.value % 2 == 1) {
      step.push_back(act);
    }
  }
  EXPECT_EQ(ids(Model(net, step).choose(Model::options(64 * kAll))), (Ids{1, 3, 0, 2}));
}

TEST(HybridPlacementTest, ChunksThatNoModuleUsesStayOnTheHost) {
  EXPECT_EQ(ids(Model(Net::row(4), row_step(2)).choose(Model::options(64 * kAll))), (Ids{0, 1}));
}

TEST(HybridPlacementTest, AccumulatedGradientsCountWhereTheyArriveLast) {
  Step step = row_step(3);
  const Step again = row_step(2);  // the second micro-batch does not reach the last module
  step.insert(step.end(), again.begin(), again.end());
  EXPECT_EQ(ids(Model(Net::row(3), step).choose(Model::options(64 * kAll))), (Ids{0, 1, 2}));
}

TEST(HybridPlacementTest, SizesAndRatioAreChecked) {
  Model model = row(2);
  EXPECT_THROW((void)model.choose(Model::options(kAll, 1.5)), InvalidArgument);
  EXPECT_THROW((void)model.choose(Model::options(kAll, -0.5)), InvalidArgument);
  model.candidates.pop_back();
  EXPECT_THROW((void)model.choose(Model::options(kAll)), InvalidArgument);
  Model other = row(2);
  other.trace = Trace({{EventKind::kForwardEnter, 0, 0, 0}, {EventKind::kGradReady, 7, 0, 0}});
  EXPECT_THROW((void)other.choose(Model::options(64 * kAll)), InvalidArgument);
}

TEST(HybridPlacementTest, RandomModelsNeverGetWorseAndChoicesAreDeterministic) {
  std::mt19937 random(17);
  std::size_t num_resident = 0;
  for (int round = 0; round < 300; ++round) {
    const Net net = testing::random_net(random);
    const Model model(net, testing::random_step(net, random));
    const std::size_t all = std::accumulate(model.bytes.begin(), model.bytes.end(), std::size_t{0});
    const std::size_t budget =
        model.trace.peak_nonmodel_bytes() + kSlot + random() % (all + all / 4 + 1);
    HybridOptions options = Model::options(budget);
    options.plan.max_prefetch = random() % 3;
    const Promotions promotions = model.choose(options);
    EXPECT_EQ(ids(promotions), ids(model.choose(options)));
    num_resident += promotions.chunks.size();
    std::size_t bytes = 0;
    for (const ChunkId chunk : promotions.chunks) {
      bytes += model.bytes[index(chunk)];
    }
    EXPECT_EQ(promotions.bytes, bytes);
    if (promotions.chunks.empty()) {
      continue;
    }
    const Prediction streamed = model.predict({}, options.plan);
    const Prediction hybrid = model.predict(promotions, options.plan);
    EXPECT_LE(hybrid.h2d_bytes, streamed.h2d_bytes) << "round " << round;
    EXPECT_LE(hybrid.demand_fetches, streamed.demand_fetches) << "round " << round;
    EXPECT_LE(hybrid.peak_device_bytes, budget) << "round " << round;
    EXPECT_LE(hybrid.smallest_budget_bytes, budget) << "round " << round;
  }
  EXPECT_GT(num_resident, 300u);
}

}  // namespace
}  // namespace castor
