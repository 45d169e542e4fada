#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/collectives.h"
#include "ranks/rank_waits.h"

namespace castor {

/// Collectives of some process groups of one set of ranks, and a description of their link.
struct LinkedGroups {
  std::vector<std::shared_ptr<Collectives>> groups;  ///< in the order of their names
  /// Text for reports; says why the link is not memory, where it is not.
  std::string link;
};

/// Makes collectives of process groups that torch.distributed has made. They are given by name, and
/// there is at least one. All of them go through memory of their machines where that is possible
/// (Collectives::node), else over the groups.
///
/// Only ranks that give the same `mark` share memory; with nullopt none do. `waits` has the meaning
/// that it has for GroupCollectives. Every rank calls this. Throws the UsageError of
/// GroupCollectives, and Error where another rank is gone.
[[nodiscard]] LinkedGroups link_groups(std::span<const std::string> names,
                                       const std::optional<std::string>& mark,
                                       const std::shared_ptr<RankWaits>& waits);

}  // namespace castor
