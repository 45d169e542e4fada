#include "dist/linked_groups.h"

#include "dist/group_collectives.h"
#include "dist/shared_collectives.h"

namespace castor {

LinkedGroups link_groups(std::span<const std::string> names, bool may_share_memory) {
  LinkedGroups linked;
  for (const std::string& name : names) {
    linked.groups.push_back(std::make_shared<GroupCollectives>(name));
  }
  std::string why = may_share_memory ? "" : "as asked for";
  for (std::shared_ptr<Collectives>& group : linked.groups) {
    if (why.empty()) {
      SharedCollectives shared = share_memory(*group);
      why = shared.refusal;
      group = shared.ranks ? shared.ranks : group;
    }
  }
  linked.link = linked.groups.at(0)->description() + (why.empty() ? "" : " (" + why + ")");
  linked.share_memory = why.empty();
  return linked;
}

}  // namespace castor
