#include "ranks/node_collectives.h"

#include <algorithm>
#include <vector>

#include "ranks/inter_node_group.h"

namespace castor {
namespace {

/// Up to this size of what each gives: a rank has it of all machines, beside the result.
constexpr std::size_t kMostByNodes = std::size_t{64} << 10;
constexpr std::uint32_t kTag = 1U << 30;  // no other message has it

}  // namespace

std::string NodeCollectives::description() const {
  return group_->description() + " between " + std::to_string(size() / node_->size()) +
         " machines, and memory that the " + std::to_string(node_->size()) + " ranks of each share";
}

void NodeCollectives::all_gather(std::span<const std::byte> own, std::span<std::byte> all) {
  if (own.size() <= kMostByNodes) {
    gather_by_nodes(own, all);
  } else {
    over_group([&] { group_->all_gather(own, all); });
  }
}

void NodeCollectives::gather_by_nodes(std::span<const std::byte> own, std::span<std::byte> all) {
  const std::size_t bytes = own.size();
  const InterNodeGroup others(*this);
  std::vector<std::byte> of_place(others.num_nodes() * bytes);
  const auto of_node = [&](std::size_t node) {
    return std::span(of_place).subspan(node * bytes, bytes);
  };
  std::ranges::copy(own, of_node(others.node()).begin());
  std::vector<PendingMessage> pending;
  others.for_each([&](std::size_t node) {
    pending.push_back(others.receive(node, kTag, of_node(node)));
    pending.push_back(others.send(node, kTag, of_node(others.node())));
  });
  others.wait_all(pending);
  std::vector<std::byte> by_place(of_place.size() * node_->size());
  or_leave(*this, [&] { node_->all_gather(of_place, by_place); });
  for (std::size_t rank = 0; rank < size(); ++rank) {
    const std::size_t node = rank / node_->size();
    const std::size_t place = rank % node_->size();
    const std::size_t begin = (place * others.num_nodes() + node) * bytes;
    std::ranges::copy(std::span(by_place).subspan(begin, bytes), all.subspan(rank * bytes).begin());
  }
}

void NodeCollectives::all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) {
  over_group([&] { group_->all_to_all(sent, received); });
}

void NodeCollectives::ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) {
  over_group([&] { group_->ring_shift(sent, received); });
}

// A barrier of the machine's ranks comes before: it names a rank that is gone, or goes meanwhile.
void NodeCollectives::over_group(const std::function<void()>& call) {
  or_leave(*this, [&] {
    barrier(*node_);
    try {
      call();
    } catch (const Error&) {
      if (const std::string ended = node_->ended(); !ended.empty()) {
        throw lost_ranks(*this, ended);
      }
      throw;
    }
  });
}

void NodeCollectives::leave() noexcept {
  group_->leave();
  node_->leave();
}

}  // namespace castor
