#include "ranks/node_collectives.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "ranks/thread_nodes.h"

namespace castor {
namespace {

struct Case {
  std::size_t ranks;
  std::size_t nodes;
};
class NodeCollectivesTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Ranks, NodeCollectivesTest,
                         ::testing::Values(Case{4, 2}, Case{6, 2}, Case{6, 3}),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return std::to_string(info.param.ranks) + "On" +
                                  std::to_string(info.param.nodes);
                         });

// Little, and so much that it goes over the group.
TEST_P(NodeCollectivesTest, RanksGatherInTheOrderOfAll) {
  ThreadRanks threads(GetParam().ranks, 3);
  ThreadMessages messages(GetParam().ranks);
  threads.run([&](Collectives& group) {
    const std::shared_ptr<Collectives> ranks = on_nodes(group, GetParam().nodes, messages);
    EXPECT_EQ(ranks->node()->size(), GetParam().ranks / GetParam().nodes);
    for (const std::size_t numel : {0, 1, 77, 40'000, 3}) {
      const std::vector<std::uint32_t> own(numel, static_cast<std::uint32_t>(group.rank() + numel));
      std::vector<std::uint32_t> all(numel * group.size());
      ranks->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
      for (std::size_t i = 0; i < all.size(); ++i) {
        ASSERT_EQ(all[i], i / numel + numel);
      }
    }
  });
  EXPECT_EQ(threads.failures(), std::vector<std::string>(GetParam().ranks));
}

// Nobody comes from one machine any more: each of the other's ranks is told, also those whose
// peer has sent what it had. Who waited for the one that ended names it as the run does.
TEST_P(NodeCollectivesTest, ARankThatEndsTakesItsMachineAlong) {
  ThreadRanks threads(GetParam().ranks, 3);
  ThreadMessages messages(GetParam().ranks);
  const std::size_t last = GetParam().ranks - 1;
  std::barrier<> all_have(static_cast<std::ptrdiff_t>(GetParam().ranks));
  threads.run([&](Collectives& group) {
    const std::shared_ptr<Collectives> ranks = on_nodes(group, GetParam().nodes, messages);
    barrier(*ranks);
    all_have.arrive_and_wait();
    if (group.rank() == last) {
      messages.kill(last);
      return;
    }
    barrier(*ranks);
  });
  for (std::size_t rank = 0; rank < last; ++rank) {
    EXPECT_NE(threads.failures()[rank].find(" lost the others: rank "), std::string::npos)
        << threads.failures()[rank];
    const std::size_t of_machine = GetParam().ranks / GetParam().nodes;
    if (rank % of_machine == last % of_machine) {
      const std::string named = "rank " + std::to_string(100 + last) + ", on another machine";
      EXPECT_NE(threads.failures()[rank].find(named), std::string::npos)
          << threads.failures()[rank];
    }
  }
}

}  // namespace
}  // namespace castor
