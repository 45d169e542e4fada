#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/chunk_manager.h"
#include "core/collectives.h"
#include "core/error.h"
#include "core/rank_meeting.h"
#include "dist/device_staging.h"
#include "dist/rank_weights.h"
#include "torch/rank_gradients.h"
#include "torch/rank_homes.h"
#include "torch/rank_states.h"
#include "torch/session_device.h"
#include "torch/state_places.h"

namespace castor {

/// For a rank's payloads of a kind, where they live for good when it is called, or are promoted
/// later. Takes what it needs from the host, and throws OutOfMemory. All outlive it.
[[nodiscard]] DeviceStaging make_staging(ChunkManager& chunks, PayloadKind kind, CopyEngine& copies,
                                         const SessionDevice& device);

/// What a session does with the other ranks that train its model. Owned by the session.
class SessionRanks {
 public:
  /// Meets the others; see RankMeeting and RankGradients, whose errors it throws. All but the
  /// groups outlive this. `homes`: see RankWeights. `parts`: of gradients; nullptr: there are none.
  /// `copies`: between the device and the host.
  SessionRanks(const RankGroups& groups, ChunkManager& chunks, const ShardMap& shards,
               GradientSink& gradients, GradientParts* parts, const StatePlaces& places,
               const RankHomes& homes, CopyEngine& copies, Executor& executor)
      : layout_(chunks.layout()),
        passes_(groups.passes),
        link_(homes.refusal().empty() ? groups.link
                                      : groups.link + ", but not homes: " + homes.refusal()),
        meeting_(*passes_, layout_),
        gradients_(groups.gradients, meeting_, layout_,
                   {.sink = gradients,
                    .homes = homes.gradients().homes.get(),
                    .parts = parts,
                    .shards = shards,
                    .staging = make_staging(chunks, PayloadKind::kGrad, copies, places.device())},
                   executor, chunks.host()),
        states_(*passes_, meeting_, layout_, shards, places),
        weights_(groups.updates, homes.weights().homes.get(),
                 make_staging(chunks, PayloadKind::kParam, copies, places.device())) {}

  [[nodiscard]] RankGradients& gradients() noexcept { return gradients_; }
  [[nodiscard]] RankStates& states() noexcept { return states_; }
  [[nodiscard]] RankWeights& weights() noexcept { return weights_; }

  /// Returns when every rank is here, which is known to come.
  void meet() { castor::meet(*passes_); }

  /// As RankMeeting's.
  void weights_updated(std::vector<WeightDigest> digests) {
    meeting_.weights_updated(std::move(digests));
  }

  // Around the replacing of weights, which every rank does. Throw as RankMeeting.
  /// From now on no rank reads them.
  void begin_load() { meeting_.meet_to_load(); }
  /// All ranks have theirs, and may read the others' again.
  void end_load(const StatePlaces& places) {
    meeting_.meet_to_load();
    std::vector<const Payload*> weights;
    for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
      weights.push_back(&places.weights(ChunkId{static_cast<std::uint32_t>(i)}));
    }
    weights_.settle(weights);
  }

  /// This run cannot go on here: nobody shall wait for it. From any thread.
  void leave() noexcept {
    left_ = true;
    gradients_.leave();
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
  /// ... and of them to ranks of other machines, where each has homes that its ranks share.
  [[nodiscard]] std::uint64_t bytes_crossed() const noexcept {
    return gradients_.figures().bytes_crossed() + weights_.figures().bytes_crossed();
  }
  /// Of both; they may have run beside each other.
  [[nodiscard]] std::chrono::nanoseconds time() const noexcept {
    return gradients_.figures().time() + weights_.figures().time();
  }

 private:
  const ChunkLayout& layout_;
  const std::shared_ptr<Collectives> passes_;
  const std::string link_;
  RankMeeting meeting_;
  RankGradients gradients_;
  RankStates states_;
  RankWeights weights_;
  std::atomic<bool> left_ = false;
};

}  // namespace castor
