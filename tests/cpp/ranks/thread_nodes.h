#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "ranks/node_collectives.h"
#include "ranks/shared_collectives.h"

namespace castor {

/// Ranks of a test: how many, whether those of a machine share memory, and on how many machines.
struct RankCase {
  std::size_t ranks;
  bool shared;
  std::size_t nodes = 1;
};
inline std::string name_of(const ::testing::TestParamInfo<RankCase>& info) {
  const std::size_t nodes = info.param.nodes;
  return (info.param.shared ? "Shared" : "Apart") + std::to_string(info.param.ranks) +
         (nodes == 1 ? "" : "On" + std::to_string(nodes));
}

/// A rank of a test among `nodes` machines with as many ranks each: threads, as its `group`.
inline std::shared_ptr<Collectives> on_nodes(Collectives& group, std::size_t nodes,
                                             ThreadMessages& messages) {
  const std::shared_ptr<Collectives> all(&group, [](Collectives*) {});
  if (nodes == 1) {
    return all;
  }
  const SharedCollectives node = share_memory(group, group.size() / nodes);
  if (!node.ranks) {
    throw Error(node.refusal);
  }
  return std::make_shared<NodeCollectives>(all, node.ranks, messages.of_rank(group.rank()));
}

}  // namespace castor
