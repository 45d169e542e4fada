#include "dist/linked_groups.h"

#include "dist/group_collectives.h"
#include "dist/group_messages.h"
#include "dist/node_collectives.h"
#include "dist/shared_collectives.h"
#include "dist/shared_file.h"

namespace castor {

LinkedGroups link_groups(std::span<const std::string> names,
                         const std::optional<std::string>& mark) {
  LinkedGroups linked;
  for (const std::string& name : names) {
    linked.groups.push_back(std::make_shared<GroupCollectives>(name));
  }
  const Nodes nodes = mark ? find_nodes(*linked.groups[0], *mark) : Nodes{1, "as asked for"};
  std::string why = nodes.refusal;
  std::vector<std::shared_ptr<Collectives>> in_memory;
  for (std::size_t i = 0; i < names.size() && why.empty(); ++i) {
    const std::shared_ptr<Collectives>& group = linked.groups[i];
    SharedCollectives shared = share_memory(*group, nodes.size);
    why = shared.refusal;
    if (shared.ranks && shared.ranks->size() < group->size()) {
      shared.ranks = std::make_shared<NodeCollectives>(group, std::move(shared.ranks),
                                                       std::make_shared<GroupMessages>(names[i]));
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
