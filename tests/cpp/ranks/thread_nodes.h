#pragma once

#include <cstddef>
#include <memory>

#include "core/error.h"
#include "core/thread_collectives.h"
#include "core/thread_messages.h"
#include "ranks/node_collectives.h"
#include "ranks/shared_collectives.h"

namespace castor {

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
