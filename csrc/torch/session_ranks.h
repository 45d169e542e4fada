#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/collectives.h"
#include "core/error.h"
#include "core/rank_meeting.h"
#include "torch/rank_gradients.h"
#include "torch/rank_states.h"
#include "torch/rank_weights.h"

namespace castor {

/// What a session does with the other ranks that train its model. Owned by the session.
class SessionRanks {
 public:
  /// Meets the others; see RankMeeting and RankGradients, whose errors it throws. All but the
  /// groups outlive this.
  SessionRanks(const RankGroups& groups, const ChunkLayout& layout, const ShardMap& shards,
               GradientSink& gradients, const StatePlaces& places, Executor& executor,
               MemoryTier& host)
      : passes_(groups.passes),
        link_(groups.link),
        meeting_(*passes_, layout),
        gradients_(*passes_, meeting_, layout, gradients, executor, host),
        states_(*passes_, meeting_, layout, shards, places),
        weights_(groups.updates) {}

  [[nodiscard]] RankGradients& gradients() noexcept { return gradients_; }
  [[nodiscard]] RankStates& states() noexcept { return states_; }
  [[nodiscard]] RankWeights& weights() noexcept { return weights_; }

  /// This run cannot go on here: nobody shall wait for it. From any thread.
  void leave() noexcept {
    left_ = true;
    weights_.leave();
    passes_->leave();
  }
  /// Throws Error after leave().
  void check_there() const {
    if (left_) {
      throw Error("rank " + std::to_string(rank()) + " of " + std::to_string(size()) +
                  " has let go of the others when its own run could not go on: start all again, "
                  "from the last checkpoint");
    }
  }

  [[nodiscard]] std::size_t rank() const noexcept { return passes_->rank(); }
  [[nodiscard]] std::size_t size() const noexcept { return passes_->size(); }
  [[nodiscard]] const std::string& link() const noexcept { return link_; }
  /// Of gradients and weights, to other ranks.
  [[nodiscard]] std::uint64_t bytes_sent() const noexcept {
    return gradients_.figures().bytes_sent() + weights_.figures().bytes_sent();
  }
  /// Of both; they may have run beside each other.
  [[nodiscard]] std::chrono::nanoseconds time() const noexcept {
    return gradients_.figures().time() + weights_.figures().time();
  }

 private:
  const std::shared_ptr<Collectives> passes_;
  const std::string link_;
  RankMeeting meeting_;
  RankGradients gradients_;
  RankStates states_;
  RankWeights weights_;
  std::atomic<bool> left_ = false;
};

}  // namespace castor
