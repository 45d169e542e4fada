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
  std::unique_ptr<RankMessage> message;  ///< nullptr: there is no message, or it is over
};

/// The inter-node group of a rank: the ranks with its local rank on the other machines. It
/// exchanges with them data that the ranks of its machine do not each need to send.
///
/// A call that fails leaves the ranks, so that nobody on this machine waits for this one, and
/// throws Error. The error names a rank of this machine that has ended, where there is one, because
/// the rank of the other machine may be gone for that reason. Otherwise it names the rank that the
/// call concerns.
class InterNodeGroup {
 public:
  /// Takes ranks that have Collectives::node(); ranks without messages are on one machine. `ranks`
  /// outlives this.
  explicit InterNodeGroup(Collectives& ranks) : ranks_(ranks) {}

  [[nodiscard]] std::size_t num_nodes() const { return ranks_.size() / ranks_.node()->size(); }
  /// Returns the index of this rank's machine.
  [[nodiscard]] std::size_t node() const { return ranks_.rank() / ranks_.node()->size(); }
  [[nodiscard]] std::size_t rank_on(std::size_t node) const {
    return node * ranks_.node()->size() + ranks_.node()->rank();
  }
  /// Calls `work` with the index of each other machine.
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
  /// Waits until the message is over; returns at once where there is none.
  void wait(PendingMessage& pending) const;
  void wait_all(std::span<PendingMessage> pending) const;

 private:
  template <typename Call>
  auto with(std::size_t rank, const Call& call) const;

  Collectives& ranks_;
};

}  // namespace castor
