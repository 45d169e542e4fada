// States that two to four ranks have shards of; the ranks are threads. An element's value says
// where in its parameter it is.

#include "store/rank_states.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_collectives.h"
#include "store/errors.h"
#include "store/test_store.h"

namespace castor::testing {
namespace {

using Bytes = std::vector<std::byte>;
using Strings = std::vector<std::string>;

constexpr PayloadKind kExpAvg = rule_payload(0);

/// Returns the full state of a parameter.
Bytes state_of(const TestStore& store, ParamId param, PayloadKind kind) {
  Bytes full(store.states->bytes(param, kind, store.layout.param(param).numel));
  for (std::size_t i = 0; i < full.size(); ++i) {
    full[i] = static_cast<std::byte>(i % 251 + 31 * index(param) + static_cast<std::size_t>(kind));
  }
  return full;
}

/// One rank's states, filled.
struct RankStore {
  RankStore(Collectives& ranks, const SmallModel& model, std::size_t chunk_bytes,
            const StoreOptions& options = {})
      : store(model.layout(chunk_bytes, options.rule.get(), ranks.size()),
              with_groups(options, ranks)),
        consistency(ranks, store.layout),
        states(ranks, consistency, store.layout, store.shards, *store.states) {
    for (std::size_t i = 0; i < store.layout.params().size(); ++i) {
      const ParamId param = param_id(i);
      for (const PayloadKind kind : store.states->kinds(store.layout.place(param).chunk)) {
        const Bytes full = state_of(store, param, kind);
        const Piece piece = store.shards.piece(param);
        const auto begin = full.begin() + static_cast<std::ptrdiff_t>(store.states->bytes(
                                              param, kind, piece.first_element));
        store.write_state(param, kind,
                          Bytes(begin, begin + static_cast<std::ptrdiff_t>(
                                                   store.states->bytes(param, kind, piece.numel))));
      }
    }
  }
  [[nodiscard]] bool reads_all() {
    bool equal = true;
    for (std::size_t i = 0; i < store.layout.params().size(); ++i) {
      for (const PayloadKind kind : store.states->kinds(store.layout.place(param_id(i)).chunk)) {
        equal = states.read(param_id(i), kind) == state_of(store, param_id(i), kind) && equal;
      }
    }
    return equal;
  }

  TestStore store;
  ConsistencyCheck consistency;
  RankStates states;

 private:
  static StoreOptions with_groups(StoreOptions options, Collectives& ranks) {
    options.ranks = groups_of(ranks);
    options.file_name = "rank-" + std::to_string(ranks.rank());
    return options;
  }
};

/// Runs `work` on threads that are ranks.
void on_ranks(std::size_t size, const std::function<void(Collectives&)>& work) {
  ThreadRanks ranks(size, 0, std::chrono::microseconds(0));
  ranks.run(work);
  EXPECT_EQ(ranks.failures(), Strings(size));
}

class RankStatesTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(RankStatesTest, EveryRankReadsTheFullStates) {
  on_ranks(GetParam(), [](Collectives& ranks) {
    SmallModel model;
    model.add(100).add(300).add(0).add(7);
    RankStore rank(ranks, model, 1024);
    EXPECT_TRUE(rank.reads_all());
  });
}

TEST_P(RankStatesTest, BlocksOfMomentsAreGatheredWithTheirScales) {
  on_ranks(GetParam(), [](Collectives& ranks) {
    SmallModel model;
    model.add(100, ScalarType::kBFloat16).add(1500, ScalarType::kBFloat16);
    RankStore rank(ranks, model, 2048 * ranks.size(), {.rule = adam(StateFormat::kSplitInt8)});
    EXPECT_TRUE(rank.reads_all());
  });
}

TEST_P(RankStatesTest, StatesOnNvmeAreGathered) {
  const test::TempDirectory directory("/dev/shm");
  on_ranks(GetParam(), [&](Collectives& ranks) {
    RankStore rank(
        ranks, SmallModel::row(3, 200), 1024,
        {.states_on_nvme = {true, false, true}, .state_slots = 1, .directory = directory.string()});
    EXPECT_TRUE(rank.reads_all());
  });
}

TEST_P(RankStatesTest, OneRankReadsWhatTheOthersServe) {
  on_ranks(GetParam(), [](Collectives& ranks) {
    RankStore rank(ranks, SmallModel::row(2, 200), 1024);
    for (std::size_t reader = 0; reader < ranks.size(); ++reader) {
      if (ranks.rank() == reader) {
        EXPECT_TRUE(rank.reads_all());
        rank.states.end_service();
      } else {
        rank.states.serve();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RankStatesTest, ::testing::Values(2, 3, 4),
                         [](const auto& one) { return std::to_string(one.param) + "Ranks"; });

TEST(StatesOfRanksTest, AParameterThatOneRankHasAllOfIsReadByBoth) {
  on_ranks(2, [](Collectives& ranks) {
    SmallModel model;
    model.add(16).add(16);  // one on each rank
    RankStore rank(ranks, model, 128);
    EXPECT_EQ(rank.store.shards.piece(param_id(1 - ranks.rank())).numel, 0U);
    EXPECT_TRUE(rank.reads_all());
  });
}

TEST(StatesOfRanksTest, StatesLargerThanTheWindowComeInSeveralRounds) {
  on_ranks(2, [](Collectives& ranks) {
    SmallModel model;
    model.add(600'000);  // 1.2 MB of a moment on each rank
    RankStore rank(ranks, model, 2'400'000);
    EXPECT_TRUE(rank.states.read(param_id(0), kExpAvg) ==
                state_of(rank.store, param_id(0), kExpAvg));
  });
}

TEST(StatesOfRanksTest, AServiceThatIsEndedAtOnceServesNothing) {
  on_ranks(3, [](Collectives& ranks) {
    RankStore rank(ranks, SmallModel::row(1, 48), 192);
    if (ranks.rank() == 1) {
      rank.states.end_service();
    } else {
      rank.states.serve();
    }
  });
}

TEST(StatesOfRanksTest, RanksThatReadDifferentStatesAreAllRefused) {
  on_ranks(2, [](Collectives& ranks) {
    RankStore rank(ranks, SmallModel::row(2, 32), 128);
    EXPECT_THROW(static_cast<void>(rank.states.read(param_id(ranks.rank()), kExpAvg)), UsageError);
  });
}

TEST(StatesOfRanksTest, ARankWhoseReadFailsLeavesTheOthers) {
  const test::TempDirectory directory("/dev/shm");
  const ScopedFaults faults("read:1+:EIO");
  ThreadRanks threads(2, 0, std::chrono::microseconds(0));
  threads.run([&](Collectives& ranks) {
    StoreOptions options{.directory = directory.string()};
    if (ranks.rank() == 1) {
      options.states_on_nvme = {true, true};
      options.state_slots = 1;
    }
    RankStore rank(ranks, SmallModel::row(2, 64), 256, options);
    rank.store.states->flush();
    static_cast<void>(rank.states.read(param_id(0), kExpAvg));
  });
  EXPECT_NE(threads.failures()[0].find("one has let go"), std::string::npos)
      << threads.failures()[0];
  EXPECT_NE(threads.failures()[1].find("Input/output error"), std::string::npos)
      << threads.failures()[1];
}

}  // namespace
}  // namespace castor::testing
