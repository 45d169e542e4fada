#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "c10d/group_messages.h"
#include "core/collectives.h"
#include "core/rank_messages.h"
#include "ranks/rank_waits.h"

namespace castor {

/// Collectives over host memory of a process group that torch.distributed has made. They are made
/// of messages of the group's backend for the CPU, gloo: its own collectives could not be ended
/// where a rank is lost (RankHealth). Bytes are those of gloo's. May be made and called with or
/// without Python's lock, which must not be held where others need it to arrive.
class GroupCollectives final : public Collectives {
 public:
  /// Takes the group by its name in torch.distributed. `waits` records where this rank waits.
  /// Throws UsageError where there is no such group, or no such backend.
  GroupCollectives(const std::string& group, std::shared_ptr<RankWaits> waits);

  [[nodiscard]] std::size_t rank() const noexcept override;
  [[nodiscard]] std::size_t size() const noexcept override;
  [[nodiscard]] std::string name() const override { return place_->name(); }
  [[nodiscard]] std::string name_of(std::size_t rank) const override {
    return place_->name_of(rank);
  }
  [[nodiscard]] std::string description() const override;
  void all_gather(std::span<const std::byte> own, std::span<std::byte> all) override;
  void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) override;
  void ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) override;
  /// Copies `values` of rank 0 to every rank.
  void broadcast(std::span<std::byte> values);
  [[nodiscard]] LostRank find_lost() const override { return place_->find_lost(); }
  /// Leaves the group. gloo can break a connection only by ending: other ranks hear of it then, or
  /// at their timeout.
  void leave() noexcept override { left_ = true; }
  void set_place(std::string place) override { place_->set(std::move(place)); }
  /// Returns how this group waits, for other objects that wait for the same ranks.
  [[nodiscard]] RankPatience patience() const;

 private:
  using Message = std::unique_ptr<RankMessage>;

  template <typename Call>
  void complete(const Call& call);
  [[nodiscard]] Message send(std::size_t to, std::span<const std::byte> bytes);
  [[nodiscard]] Message receive(std::size_t from, std::span<std::byte> bytes);
  void wait_all(std::vector<Message> messages);
  void keep(std::vector<Message> done) { done_ = std::move(done); }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<RankPlace> place_;
  GroupMessages messages_;
  std::atomic<bool> left_ = false;
  /// Messages of the last call, which are over. gloo's thread may still hold a message when it has
  /// woken the thread that waits for it. Where the message then ended, that thread would spin until
  /// gloo's has let go of it, for milliseconds if both run on one core.
  std::vector<Message> done_;
};

}  // namespace castor
