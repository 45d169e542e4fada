#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "core/collectives.h"

namespace castor {

/// Collectives of ranks on several machines: as many on each, one machine's behind another's. The
/// ranks of a machine share memory.
///
/// A small all-gather crosses between ranks of the same place on their machines, and goes through
/// memory within a machine. A large all-gather, and every other call, goes over the group of all
/// ranks. A rank that fails takes its machine's ranks along: they throw at once.
class NodeCollectives final : public Collectives {
 public:
  /// Takes the collectives `group` of all ranks, those of this machine's ranks as `node`, and
  /// `messages` between all ranks, which are used for nothing else. There are several machines.
  NodeCollectives(std::shared_ptr<Collectives> group, std::shared_ptr<Collectives> node,
                  std::shared_ptr<RankMessages> messages)
      : group_(std::move(group)), node_(std::move(node)), messages_(std::move(messages)) {}

  [[nodiscard]] std::size_t rank() const noexcept override { return group_->rank(); }
  [[nodiscard]] std::size_t size() const noexcept override { return group_->size(); }
  [[nodiscard]] std::string name() const override { return group_->name(); }
  [[nodiscard]] std::string name_of(std::size_t rank) const override {
    return group_->name_of(rank);
  }
  [[nodiscard]] std::string description() const override;
  [[nodiscard]] Collectives* node() noexcept override { return node_.get(); }
  [[nodiscard]] RankMessages* messages() noexcept override { return messages_.get(); }

  [[nodiscard]] LostRank find_lost() const override {
    const LostRank here = node_->find_lost();
    return here.why.empty() ? group_->find_lost() : here;
  }

  void all_gather(std::span<const std::byte> own, std::span<std::byte> all) override;
  void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) override;
  void ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) override;
  void set_place(std::string place) override {
    group_->set_place(place);
    node_->set_place(std::move(place));
  }
  void leave() noexcept override;

 private:
  void gather_by_nodes(std::span<const std::byte> own, std::span<std::byte> all);
  void over_group(const std::function<void()>& call);

  const std::shared_ptr<Collectives> group_;
  const std::shared_ptr<Collectives> node_;
  const std::shared_ptr<RankMessages> messages_;
};

}  // namespace castor
