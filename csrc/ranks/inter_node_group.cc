#include "ranks/inter_node_group.h"

#include <string>

namespace castor {

template <typename Call>
auto InterNodeGroup::with(std::size_t rank, const Call& call) const {
  try {
    return call();
  } catch (const Error& error) {
    const std::string ended = ranks_.node()->ended();
    ranks_.leave();
    throw lost_ranks(ranks_, !ended.empty()
                                 ? ended
                                 : ranks_.name_of(rank) + ", on another machine: " + error.what());
  }
}

PendingMessage InterNodeGroup::send(std::size_t node, std::uint32_t tag,
                                    std::span<const std::byte> bytes) const {
  const std::size_t rank = rank_on(node);
  return {rank, with(rank, [&] { return ranks_.messages()->send(rank, tag, bytes); })};
}

PendingMessage InterNodeGroup::receive(std::size_t node, std::uint32_t tag,
                                       std::span<std::byte> bytes) const {
  const std::size_t rank = rank_on(node);
  return {rank, with(rank, [&] { return ranks_.messages()->receive(rank, tag, bytes); })};
}

void InterNodeGroup::wait(PendingMessage& pending) const {
  if (const auto message = std::move(pending.message)) {
    with(pending.rank, [&] { message->wait(); });
  }
}

void InterNodeGroup::wait_all(std::span<PendingMessage> pending) const {
  for (PendingMessage& one : pending) {
    wait(one);
  }
}

}  // namespace castor
