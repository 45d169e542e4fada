#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/collectives.h"
#include "dist/rank_waits.h"

namespace castor {

/// Collectives of some process groups of one set of ranks, and what they go through.
struct LinkedGroups {
  std::vector<std::shared_ptr<Collectives>> groups;  ///< in the order of their names
  std::string link;                                  ///< for reports: and why not memory
};

/// Of process groups that torch.distributed has made, by name, at least one: through memory of
/// their machines where that can be, all of them (Collectives::node), else over the groups. `mark`:
/// only ranks that give the same share memory; nullopt: none do. `waits`: as GroupCollectives.
/// Every rank calls it. Throws UsageError as GroupCollectives, Error where another rank is gone.
[[nodiscard]] LinkedGroups link_groups(std::span<const std::string> names,
                                       const std::optional<std::string>& mark,
                                       const std::shared_ptr<RankWaits>& waits);

}  // namespace castor
