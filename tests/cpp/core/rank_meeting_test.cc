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

GradientMarks none(const ChunkLayout& layout) {
  return {.fresh = std::vector<bool>(layout.chunks().size(), false),
          .present = std::vector<bool>(layout.params().size(), false),
          .scale = std::nullopt};
}

class RankMeetingTest : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Sizes, RankMeetingTest, ::testing::Values(2, 3, 5));

TEST_P(RankMeetingTest, WhatOneRankHasAllHave) {
  ThreadRanks ranks(GetParam(), 7);
  const ChunkLayout layout = layout_of(6);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    for (int step = 0; step < 20; ++step) {
      GradientMarks marks = none(layout);
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
      EXPECT_EQ(meeting.meet(MeetingPoint::kStep, none(layout)).scale, std::nullopt);
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
    static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, none(layout)));
    const bool last = own.rank() + 1 == own.size();
    static_cast<void>(
        meeting.meet(last ? MeetingPoint::kStep : MeetingPoint::kBackwardEnd, none(layout)));
  });
  for (const std::string& failure : ranks.failures()) {
    EXPECT_NE(failure.find("rank 0 ends backward pass 2 of step 1, while rank " +
                           std::to_string(GetParam() - 1) +
                           " calls optimizer.step() after 1 backward passes, for step 1"),
              std::string::npos)
        << failure;
  }
}

TEST_P(RankMeetingTest, OneRankThatIsAStepAheadIsNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    if (own.rank() == 1) {
      meeting.end_step();
    }
    static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, none(layout)));
  });
  for (const std::string& failure : ranks.failures()) {
    EXPECT_NE(failure.find("pass 1 of step 1, while rank 1 ends backward pass 1 of step 2"),
              std::string::npos)
        << failure;
  }
}

TEST_P(RankMeetingTest, DifferentLossScalesAreNamed) {
  ThreadRanks ranks(GetParam());
  const ChunkLayout layout = layout_of(2);
  ranks.run([&](Collectives& own) {
    RankMeeting meeting(own, layout);
    GradientMarks marks = none(layout);
    marks.scale = own.rank() == 1 ? 2.0 : 1.0;
    static_cast<void>(meeting.meet(MeetingPoint::kBackwardEnd, marks));
  });
  for (const std::string& failure : ranks.failures()) {
    EXPECT_NE(failure.find("rank 0 carry loss scale 1.000000, those of rank 1 carry 2.000000"),
              std::string::npos)
        << failure;
  }
}

TEST_P(RankMeetingTest, RanksWithOtherChunksAreRefused) {
  const ChunkLayout layout = layout_of(4);
  for (const ChunkLayout& other : {layout_of(5), layout_of(4, /*trainable=*/false)}) {
    ThreadRanks ranks(GetParam());
    ranks.run([&](Collectives& own) {
      const RankMeeting meeting(own, own.rank() == 1 ? other : layout);
    });
    for (const std::string& failure : ranks.failures()) {
      EXPECT_NE(failure.find("the ranks boost different models: rank 0 has 4 parameters in 2 "),
                std::string::npos)
          << failure;
    }
  }
}

}  // namespace
}  // namespace castor
