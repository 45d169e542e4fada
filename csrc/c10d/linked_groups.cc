#include "c10d/linked_groups.h"

#include "c10d/group_collectives.h"
#include "c10d/group_messages.h"
#include "ranks/node_collectives.h"
#include "ranks/shared_collectives.h"
#include "ranks/shared_file.h"

namespace castor {

LinkedGroups link_groups(std::span<const std::string> names, const std::optional<std::string>& mark,
                         const std::shared_ptr<RankWaits>& waits) {
  LinkedGroups linked;
  std::vector<RankPatience> patience;
  for (const std::string& name : names) {
    auto group = std::make_shared<GroupCollectives>(name, waits);
    group->set_place("boosts a model");
    patience.push_back(group->patience());
    linked.groups.push_back(std::move(group));
  }
  const Nodes nodes = mark ? find_nodes(*linked.groups[0], *mark) : Nodes{1, "as asked for"};
  std::string why = nodes.refusal;
  std::vector<std::shared_ptr<Collectives>> in_memory;
  for (std::size_t i = 0; i < names.size() && why.empty(); ++i) {
    const std::shared_ptr<Collectives>& group = linked.groups[i];
    SharedCollectives shared = share_memory(*group, nodes.size, patience[i]);
    why = shared.refusal;
    if (shared.ranks && shared.ranks->size() < group->size()) {
      shared.ranks = std::make_shared<NodeCollectives>(
          group, std::move(shared.ranks),
          std::make_shared<GroupMessages>(names[i], patience[i].place));
    }
    in_memory.push_back(std::move(shared.ranks));
  }
  if (why.empty()) {
    linked.groups = std::move(in_memory);
  }
  linked.link = linked.groups[0]->description() + (why.empty() ? "" : " (" + why + ")");
  return linked;
}

}  // namespace castor
