#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "core/collectives.h"
#include "core/executor.h"
#include "core/scalar_type.h"
#include "dist/inter_node_group.h"
#include "dist/rank_figures.h"

namespace castor {

/// Makes gradients the mean of those of all ranks of several machines, in the memory that each
/// machine's ranks have in common. Sums in fp32 go from one machine to the next, each adds what its
/// ranks have, and the mean goes from the last to all: added up in the order of all ranks, rounded
/// once. It goes by pieces, so that machines are busy with different ones; of each a rank has a
/// part, as its peers do. Of elements of 4 bytes as many cross as in a reduce-scatter and a
/// gather between machines, of 2 bytes half as many again.
///
/// For one reduction. A call that fails has left the ranks.
class GradientRelay {
 public:
  /// `gradients`: this rank's; `common`: where their mean goes. Whole elements for each rank.
  /// `window`: of window_bytes. All outlive this.
  GradientRelay(Collectives& ranks, std::span<const std::byte> gradients, std::byte* common,
                ScalarType type, Executor& executor, std::span<std::byte> window,
                RankFigures& figures);

  /// For pieces of so many bytes.
  [[nodiscard]] static std::size_t window_bytes(std::size_t piece, Collectives& ranks);

  /// Every rank of a machine has sent what it has, and the mean of this rank's parts is in common
  /// memory; when the others' are, all of it is.
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
  std::vector<PendingMessage> means_;  // per piece, from the machine that has it before
  std::vector<PendingMessage> means_sent_;
};

}  // namespace castor
