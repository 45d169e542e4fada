#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/collectives.h"

namespace castor {

/// Collectives of some process groups of one set of ranks, and what they go through.
struct LinkedGroups {
  std::vector<std::shared_ptr<Collectives>> groups;  ///< in the order of their names
  std::string link;                                  ///< for reports: and why not memory
  bool share_memory = false;                         ///< all groups do
};

/// Of process groups that torch.distributed has made, by name, at least one: through memory of this
/// machine where that may be and can be, else over the groups. Every rank calls it. Throws
/// UsageError as GroupCollectives, Error where another rank is gone.
[[nodiscard]] LinkedGroups link_groups(std::span<const std::string> names, bool may_share_memory);

}  // namespace castor
