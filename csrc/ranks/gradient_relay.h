#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "core/collectives.h"
#include "core/executor.h"
#include "core/scalar_type.h"
#include "ranks/inter_node_group.h"
#include "ranks/rank_figures.h"

namespace castor {

/// Averages gradients over all ranks of several machines, in the memory that each machine's ranks
/// have in common.
///
/// Sums in fp32 go from one machine to the next, and each machine adds the gradients of its ranks.
/// The last machine sends the mean to all. So values are added up in the order of all ranks and
/// rounded once.
///
/// The gradients go through in pieces, so that machines are busy with different ones. Of each piece
/// a rank has a shard, and exchanges it with the ranks of the same place on other machines. For
/// elements of 4 bytes, as many bytes cross between machines as in a reduce-scatter and an
/// all-gather; for elements of 2 bytes, half as many again.
///
/// For one reduction. A call that fails has left the ranks.
class GradientRelay {
 public:
  /// Prepares the reduction. `gradients` are this rank's, whole elements for each rank; `common` is
  /// where their mean goes. `window` is of window_bytes. All outlive this.
  GradientRelay(Collectives& ranks, std::span<const std::byte> gradients, std::byte* common,
                ScalarType type, Executor& executor, std::span<std::byte> window,
                RankFigures& figures);

  /// Returns the bytes of the window for pieces of `piece` bytes, with so many ranks on each
  /// machine.
  [[nodiscard]] static std::size_t window_bytes(std::size_t piece, std::size_t ranks_of_machine);

  /// Runs the reduction. When it returns, every rank of this machine has sent its gradients, and
  /// the mean of this rank's shards is in common memory. The mean is complete when the other ranks
  /// of the machine have returned too.
  void run();

 private:
  static constexpr std::size_t kSums = 2;  // one is sent while the next is added up

  void add(std::size_t number);
  void pass_mean(std::size_t number);
  void send_mean(std::size_t to, std::size_t number);
  [[nodiscard]] std::size_t bytes_of(std::size_t number) const;
  [[nodiscard]] std::span<std::byte> mean_of(std::size_t number) const;

  Collectives& ranks_;
  Collectives& node_;
  const InterNodeGroup others_;
  const std::span<const std::byte> gradients_;
  std::byte* const common_;
  const ScalarType type_;
  Executor& executor_;
  const std::span<std::byte> window_;
  RankFigures& figures_;
  const std::size_t piece_bytes_;
  const std::size_t num_pieces_;
  std::array<PendingMessage, kSums> sums_sent_;
  // Messages per piece, from the machine that has the mean before this one.
  std::vector<PendingMessage> means_;
  std::vector<PendingMessage> means_sent_;
};

}  // namespace castor
