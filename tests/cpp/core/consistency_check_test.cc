#include "core/consistency_check.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/thread_collectives.h"

namespace castor {
namespace {

ChunkLayout layout_of(std::size_t params, bool trainable = true) {
  std::vector<ParamSpec> specs;
  ModuleSpec module{"module", {}, std::nullopt};
  for (std::size_t i = 0; i < params; ++i) {
    specs.push_back({.name = "p" + std::to_string(i), .numel = 64, .trainable = trainable});
    module.params.push_back(ParamId{static_cast<std::uint32_t>(i)});
  }
  return ChunkLayout(std::move(specs), {module}, {.chunk_bytes = 512, .world_size = 2});
}

void expect_everywhere(const ThreadRanks& ranks, const std::string& text) {
  for (const std::string& failure : ranks.failures()) {
    EXPECT_NE(failure.find(text), std::string::npos) << failure;
  }
}

class ConsistencyCheckTest : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ConsistencyCheckTest, ::testing::Values(2, 3, 5));

TEST_P(ConsistencyCheckTest, WhatOneRankHasAllHave) {
  ThreadRanks ranks(GetParam(), 7);
  const ChunkLayout layout = layout_of(6);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    for (int step = 0; step < 20; ++step) {
      GradientMarks marks(layout);
      marks.present[own.rank()] = true;
      marks.fresh[own.rank() % layout.chunks().size()] = true;
      if (own.rank() == 1) {
        marks.scale = 4.0 + step;
      }
      const GradientMarks all = consistency.check(SyncPoint::kBackwardEnd, marks);
      for (std::size_t i = 0; i < layout.params().size(); ++i) {
        EXPECT_EQ(all.present[i], i < own.size());
      }
      EXPECT_TRUE(all.fresh[0]);
      EXPECT_EQ(all.scale, 4.0 + step);
      EXPECT_EQ(consistency.check(SyncPoint::kStep, GradientMarks(layout)).scale, std::nullopt);
      consistency.end_step();
    }
  });
  EXPECT_EQ(ranks.failures(), std::vector<std::string>(GetParam()));
}

TEST_P(ConsistencyCheckTest, RanksAtDifferentPointsAreBothNamedOnEveryRank) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    static_cast<void>(consistency.check(SyncPoint::kBackwardEnd, GradientMarks(layout)));
    const bool last = own.rank() + 1 == own.size();
    static_cast<void>(consistency.check(last ? SyncPoint::kStep : SyncPoint::kBackwardEnd,
                                        GradientMarks(layout)));
  });
  expect_everywhere(ranks, "rank 0 ends backward pass 2 of step 1, while rank " +
                               std::to_string(GetParam() - 1) +
                               " calls optimizer.step() after 1 backward passes, for step 1");
}

TEST_P(ConsistencyCheckTest, RanksSayWhereTheyAre) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    static_cast<void>(consistency.check(SyncPoint::kBackwardEnd, GradientMarks(layout)));
    static_cast<void>(consistency.check(SyncPoint::kStep, GradientMarks(layout)));
  });
  for (const std::string& place : ranks.places()) {
    EXPECT_EQ(place, "calls optimizer.step() after 1 backward passes, for step 1");
  }
}

TEST_P(ConsistencyCheckTest, RanksThatStepDifferentOptimizersAreBothNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    for (const std::size_t optimizer : {std::size_t{1}, own.rank() == 0 ? std::size_t{0} : 1}) {
      static_cast<void>(consistency.check(SyncPoint::kStep, GradientMarks(layout), optimizer));
    }
  });
  expect_everywhere(ranks,
                    "rank 0 calls optimizers[0].step() after 0 backward passes, for step 1, while "
                    "rank 1 calls optimizers[1].step() after 0 backward passes, for step 1");
}

TEST_P(ConsistencyCheckTest, OneRankThatIsAStepAheadIsNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    if (own.rank() == 1) {
      consistency.end_step();
    }
    static_cast<void>(consistency.check(SyncPoint::kBackwardEnd, GradientMarks(layout)));
  });
  expect_everywhere(ranks, "pass 1 of step 1, while rank 1 ends backward pass 1 of step 2");
}

TEST_P(ConsistencyCheckTest, WeightsThatDivergeAreNamedOnEveryRankWhereTheyMeetNext) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(4);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    for (const bool drifts : {false, true}) {
      const bool last = own.rank() + 1 == own.size();
      consistency.weights_updated({{.param = ParamId{2}, .value = 5},
                                   {.param = ParamId{3}, .value = drifts && last ? 8u : 7u}});
      consistency.end_step();
      static_cast<void>(consistency.check(SyncPoint::kBackwardEnd, GradientMarks(layout)));
    }
  });
  expect_everywhere(ranks, "after step 2 rank 0 and rank " + std::to_string(GetParam() - 1) +
                               " have different values of parameter 'p3'");
}

TEST_P(ConsistencyCheckTest, WhatALoadReplacesIsComparedNoMore) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    consistency.weights_updated({{.param = ParamId{0}, .value = own.rank()}});
    consistency.end_step();
    consistency.check_load();
    static_cast<void>(consistency.check(SyncPoint::kBackwardEnd, GradientMarks(layout)));
  });
  EXPECT_EQ(ranks.failures(), std::vector<std::string>(GetParam()));
}

TEST_P(ConsistencyCheckTest, DifferentLossScalesAreNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    GradientMarks marks(layout);
    marks.scale = own.rank() == 1 ? 2.0 : 1.0;
    static_cast<void>(consistency.check(SyncPoint::kBackwardEnd, marks));
  });
  expect_everywhere(ranks, "rank 0 carry loss scale 1.000000, those of rank 1 carry 2.000000");
}

TEST_P(ConsistencyCheckTest, RanksThatServeAreToldWhatIsRead) {
  ThreadRanks ranks(GetParam(), 3);
  const ChunkLayout layout = layout_of(6);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    for (std::uint32_t i = 0; i < 6; ++i) {
      const StateRequest request{.param = ParamId{i}, .kind = state_payload(i % 3)};
      if (own.rank() == 1) {
        consistency.check_read(request);
      } else {
        EXPECT_EQ(consistency.next_read(), request);
      }
    }
    if (own.rank() == 1) {
      consistency.end_service();
    } else {
      EXPECT_EQ(consistency.next_read(), std::nullopt);
    }
    consistency.check_read({});  // all of them
    static_cast<void>(consistency.check(SyncPoint::kStep, GradientMarks(layout)));
  });
  EXPECT_EQ(ranks.failures(), std::vector<std::string>(GetParam()));
}

TEST_P(ConsistencyCheckTest, AStateThatOneRankAloneReadsIsNamedAndNobodyGoesOn) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    const auto arrive = [&] {
      if (own.rank() == 0) {
        consistency.check_read({.param = ParamId{1}, .kind = state_payload(2)});
      } else {
        static_cast<void>(consistency.check(SyncPoint::kBackwardEnd, GradientMarks(layout)));
      }
    };
    EXPECT_THROW(arrive(), UsageError);
    arrive();  // without the others
  });
  expect_everywhere(ranks,
                    "rank 0 reads the optimizer state of parameter 'p1' after step 0, while rank 1 "
                    "ends backward pass 1 of step 1");
}

TEST_P(ConsistencyCheckTest, ALoadThatOneRankDoesNotTakePartInIsNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    consistency.check_load();
    consistency.check_load();
    if (own.rank() == 1) {
      static_cast<void>(consistency.check(SyncPoint::kStep, GradientMarks(layout)));
    } else {
      consistency.check_load();
    }
  });
  expect_everywhere(ranks,
                    "rank 0 loads weights after step 0, while rank 1 calls optimizer.step() after "
                    "0 backward passes, for step 1");
}

TEST_P(ConsistencyCheckTest, RanksThatReadDifferentStatesAreNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    ConsistencyCheck consistency(own, layout);
    consistency.check_read({.param = ParamId{own.rank() == 1 ? 1u : 0u}, .kind = state_payload(2)});
  });
  expect_everywhere(ranks,
                    "rank 0 reads the optimizer state of parameter 'p0' after step 0, while "
                    "rank 1 reads the optimizer state of parameter 'p1'");
}

TEST_P(ConsistencyCheckTest, RanksWithOtherChunksAreRefused) {
  const ChunkLayout layout = layout_of(4);
  for (const ChunkLayout& other : {layout_of(5), layout_of(4, /*trainable=*/false)}) {
    ThreadRanks ranks(GetParam());
    ranks.run([&](Collectives& own) {
      const ConsistencyCheck consistency(own, own.rank() == 1 ? other : layout);
    });
    expect_everywhere(ranks, "the ranks boost different models: rank 0 has 4 parameters in 2 ");
  }
}

}  // namespace
}  // namespace castor
