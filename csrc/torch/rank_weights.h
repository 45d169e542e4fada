#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "core/collectives.h"
#include "torch/rank_figures.h"

namespace castor {

/// Brings the weights together of which each rank has updated its part (ShardMap): (n-1)/n of their
/// bytes are sent. Owned by the session; used by the one thread at a time that runs updates, which
/// on every rank are the same, in the same order.
class RankWeights {
 public:
  /// `ranks`: for nothing else.
  explicit RankWeights(std::shared_ptr<Collectives> ranks) : ranks_(std::move(ranks)) {}

  /// `home`: of a chunk. Its parts become those of the ranks that update them.
  void gather(std::span<std::byte> home) {
    const RankFigures::Timed timed(figures_);
    const std::size_t part = home.size() / ranks_->size();
    ranks_->all_gather(home.subspan(ranks_->rank() * part, part), home);
    figures_.add_bytes((ranks_->size() - 1) * part);
  }

  /// From any thread.
  void leave() noexcept { ranks_->leave(); }

  [[nodiscard]] const RankFigures& figures() const noexcept { return figures_; }

 private:
  const std::shared_ptr<Collectives> ranks_;
  RankFigures figures_;
};

}  // namespace castor
