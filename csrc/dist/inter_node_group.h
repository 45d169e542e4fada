#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/collectives.h"

namespace castor {

/// A message to or from a rank of another machine.
struct PendingMessage {
  std::size_t rank = 0;
  std::unique_ptr<RankMessage> message;  ///< nullptr: there is none, or it is over
};

/// The inter-node group of a rank: the ranks with its local rank on the other machines. It
/// exchanges with them what the ranks of its machine do not each need to send. A call that fails
/// leaves the ranks, so that nobody on this machine waits for this one, and throws Error, which
/// names whoever of this machine has ended before the rank that it concerns: that one may have gone
/// because of it.
class InterNodeGroup {
 public:
  /// With Collectives::node(); without messages there is one machine. Outlives this.
  explicit InterNodeGroup(Collectives& ranks) : ranks_(ranks) {}

  [[nodiscard]] std::size_t num_nodes() const { return ranks_.size() / ranks_.node()->size(); }
  /// This rank's machine.
  [[nodiscard]] std::size_t node() const { return ranks_.rank() / ranks_.node()->size(); }
  [[nodiscard]] std::size_t rank_on(std::size_t node) const {
    return node * ranks_.node()->size() + ranks_.node()->rank();
  }
  /// Of the other machines.
  template <typename Work>
  void for_each(const Work& work) const {
    for (std::size_t other = 0; other < num_nodes(); ++other) {
      if (other != node()) {
        work(other);
      }
    }
  }

  [[nodiscard]] PendingMessage send(std::size_t node, std::uint32_t tag,
                                    std::span<const std::byte> bytes) const;
  [[nodiscard]] PendingMessage receive(std::size_t node, std::uint32_t tag,
                                       std::span<std::byte> bytes) const;
  /// Returns when it is over; at once where there is none.
  void wait(PendingMessage& pending) const;
  void wait_all(std::span<PendingMessage> pending) const;

 private:
  template <typename Call>
  auto with(std::size_t rank, const Call& call) const;

  Collectives& ranks_;
};

}  // namespace castor
