#include "core/rank_meeting.h"

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

class RankMeetingTest : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Sizes, RankMeetingTest, ::testing::Values(2, 3, 5));

TEST_P(RankMeetingTest, WhatOneRankHasAllHave) {
  ThreadRanks ranks(GetParam(), 7);
  const ChunkLayout layout = layout_of(6);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    for (int step = 0; step < 20; ++step) {
      GradientMarks marks(layout);
      marks.present[own.rank()] = true;
      marks.fresh[own.rank() % layout.chunks().size()] = true;
      if (own.rank() == 1) {
        marks.scale = 4.0 + step;
      }
      const GradientMarks all = meeting.meet(MeetingPoint::kBackwardEnd, marks);
      for (std::size_t i = 0; i < layout.params().size(); ++i) {
        EXPECT_EQ(all.present[i], i < own.size());
      }
      EXPECT_TRUE(all.fresh[0]);
      EXPECT_EQ(all.scale, 4.0 + step);
      EXPECT_EQ(meeting.meet(MeetingPoint::kStep, GradientMarks(layout)).scale, std::nullopt);
      meeting.end_step();
    }
  });
  EXPECT_EQ(ranks.failures(), std::vector<std::string>(GetParam()));
}

TEST_P(RankMeetingTest, RanksAtDifferentPointsAreBothNamedOnEveryRank) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, GradientMarks(layout)));
    const bool last = own.rank() + 1 == own.size();
    static_cast<void>(meeting.meet(last ? MeetingPoint::kStep : MeetingPoint::kBackwardEnd,
                                   GradientMarks(layout)));
  });
  expect_everywhere(ranks, "rank 0 ends backward pass 2 of step 1, while rank " +
                               std::to_string(GetParam() - 1) +
                               " calls optimizer.step() after 1 backward passes, for step 1");
}

TEST_P(RankMeetingTest, RanksSayWhereTheyAre) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, GradientMarks(layout)));
    static_cast<void>(meeting.meet(MeetingPoint::kStep, GradientMarks(layout)));
  });
  for (const std::string& place : ranks.places()) {
    EXPECT_EQ(place, "calls optimizer.step() after 1 backward passes, for step 1");
  }
}

TEST_P(RankMeetingTest, RanksThatStepDifferentOptimizersAreBothNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    for (const std::size_t optimizer : {std::size_t{1}, own.rank() == 0 ? std::size_t{0} : 1}) {
      static_cast<void>(meeting.meet(MeetingPoint::kStep, GradientMarks(layout), optimizer));
    }
  });
  expect_everywhere(ranks,
                    "rank 0 calls optimizers[0].step() after 0 backward passes, for step 1, while "
                    "rank 1 calls optimizers[1].step() after 0 backward passes, for step 1");
}

TEST_P(RankMeetingTest, OneRankThatIsAStepAheadIsNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    if (own.rank() == 1) {
      meeting.end_step();
    }
    static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, GradientMarks(layout)));
  });
  expect_everywhere(ranks, "pass 1 of step 1, while rank 1 ends backward pass 1 of step 2");
}

TEST_P(RankMeetingTest, WeightsThatDivergeAreNamedOnEveryRankWhereTheyMeetNext) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(4);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    for (const bool drifts : {false, true}) {
      const bool last = own.rank() + 1 == own.size();
      meeting.weights_updated({{.param = ParamId{2}, .value = 5},
                               {.param = ParamId{3}, .value = drifts && last ? 8u : 7u}});
      meeting.end_step();
      static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, GradientMarks(layout)));
    }
  });
  expect_everywhere(ranks, "after step 2 rank 0 and rank " + std::to_string(GetParam() - 1) +
                               " have different values of parameter 'p3'");
}

TEST_P(RankMeetingTest, WhatALoadReplacesIsComparedNoMore) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    meeting.weights_updated({{.param = ParamId{0}, .value = own.rank()}});
    meeting.end_step();
    meeting.meet_to_load();
    static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, GradientMarks(layout)));
  });
  EXPECT_EQ(ranks.failures(), std::vector<std::string>(GetParam()));
}

TEST_P(RankMeetingTest, DifferentLossScalesAreNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    GradientMarks marks(layout);
    marks.scale = own.rank() == 1 ? 2.0 : 1.0;
    static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, marks));
  });
  expect_everywhere(ranks, "rank 0 carry loss scale 1.000000, those of rank 1 carry 2.000000");
}

TEST_P(RankMeetingTest, RanksThatServeAreToldWhatIsRead) {
  ThreadRanks ranks(GetParam(), 3);
  const ChunkLayout layout = layout_of(6);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    for (std::uint32_t i = 0; i < 6; ++i) {
      const StateRequest request{.param = ParamId{i}, .kind = state_payload(i % 3)};
      if (own.rank() == 1) {
        meeting.meet_to_read(request);
      } else {
        EXPECT_EQ(meeting.meet_to_serve(), request);
      }
    }
    if (own.rank() == 1) {
      meeting.end_service();
    } else {
      EXPECT_EQ(meeting.meet_to_serve(), std::nullopt);
    }
    meeting.meet_to_read({});  // all of them
    static_cast<void>(meeting.meet(MeetingPoint::kStep, GradientMarks(layout)));
  });
  EXPECT_EQ(ranks.failures(), std::vector<std::string>(GetParam()));
}

TEST_P(RankMeetingTest, AStateThatOneRankAloneReadsIsNamedAndNobodyGoesOn) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    const auto arrive = [&] {
      if (own.rank() == 0) {
        meeting.meet_to_read({.param = ParamId{1}, .kind = state_payload(2)});
      } else {
        static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, GradientMarks(layout)));
      }
    };
    EXPECT_THROW(arrive(), UsageError);
    arrive();  // without the others
  });
  expect_everywhere(ranks,
                    "rank 0 reads the optimizer state of parameter 'p1' after step 0, while rank 1 "
                    "ends backward pass 1 of step 1");
}

TEST_P(RankMeetingTest, ALoadThatOneRankDoesNotTakePartInIsNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    meeting.meet_to_load();
    meeting.meet_to_load();
    if (own.rank() == 1) {
      static_cast<void>(meeting.meet(MeetingPoint::kStep, GradientMarks(layout)));
    } else {
      meeting.meet_to_load();
    }
  });
  expect_everywhere(ranks,
                    "rank 0 loads weights after step 0, while rank 1 calls optimizer.step() after "
                    "0 backward passes, for step 1");
}

TEST_P(RankMeetingTest, RanksThatReadDifferentStatesAreNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    meeting.meet_to_read({.param = ParamId{own.rank() == 1 ? 1u : 0u}, .kind = state_payload(2)});
  });
  expect_everywhere(ranks,
                    "rank 0 reads the optimizer state of parameter 'p0' after step 0, while "
                    "rank 1 reads the optimizer state of parameter 'p1'");
}

TEST_P(RankMeetingTest, RanksWithOtherChunksAreRefused) {
  const ChunkLayout layout = layout_of(4);
  for (const ChunkLayout& other : {layout_of(5), layout_of(4, /*trainable=*/false)}) {
    ThreadRanks ranks(GetParam());
    ranks.run([&](Collectives& own) {
      const RankMeeting meeting(own, own.rank() == 1 ? other : layout);
    });
    expect_everywhere(ranks, "the ranks boost different models: rank 0 has 4 parameters in 2 ");
  }
}

}  // namespace
}  // namespace castor
