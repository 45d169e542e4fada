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
#include "core/consistency_check.h"
#include "core/error.h"
#include "ranks/device_staging.h"
#include "ranks/rank_weights.h"
#include "store/rank_gradients.h"
#include "store/rank_host_storage.h"
#include "store/rank_states.h"
#include "store/session_device.h"
#include "store/state_store.h"

namespace castor {

/// Makes the staging for payloads of one kind, whether they live on the device for good when this
/// is called or become resident later. Takes the memory that it needs from the host, and throws
/// OutOfMemory. `chunks` and `device` outlive it.
[[nodiscard]] DeviceStaging make_staging(ChunkManager& chunks, PayloadKind kind,
                                         std::shared_ptr<CopyEngine> copies,
                                         const SessionDevice& device);

/// Communication of a session with the other ranks that train its model. Owned by the session.
class SessionRanks {
 public:
  /// Compares chunks with the other ranks; throws as ConsistencyCheck and RankGradients. All
  /// arguments but the groups outlive this. `host_storage`: see RankWeights. `gradient_shards`: the
  /// sharded gradients; nullptr where there are none. `copies`:
  /// DeviceBackend::make_staging_engine().
  SessionRanks(const RankGroups& groups, ChunkManager& chunks, const ShardMap& shards,
               ChunkGradients& gradients, GradientShards* gradient_shards, const StateStore& places,
               const RankHostStorage& host_storage, std::shared_ptr<CopyEngine> copies,
               Executor& executor)
      : layout_(chunks.layout()),
        passes_(groups.passes),
        link_(host_storage.refusal().empty()
                  ? groups.link
                  : groups.link + ", but not host storage: " + host_storage.refusal()),
        reduced_on_(groups.sums                      ? "device"
                    : groups.reduces_on_host.empty() ? "host"
                                                     : "host: " + groups.reduces_on_host),
        communicators_(groups.communicators),
        consistency_(*passes_, layout_),
        gradients_(groups.gradients, groups.sums, consistency_, layout_,
                   {.gradients = gradients,
                    .storage = host_storage.gradients().storage.get(),
                    .gradient_shards = gradient_shards,
                    .shards = shards,
                    .staging = make_staging(chunks, PayloadKind::kGrad, copies, places.device()),
                    .copies = copies},
                   executor, chunks.host(), chunks.device()),
        states_(*passes_, consistency_, layout_, shards, places),
        weights_(groups.updates, host_storage.weights().storage.get(),
                 make_staging(chunks, PayloadKind::kParam, copies, places.device()),
                 groups.gathers) {}

  [[nodiscard]] RankGradients& gradients() noexcept { return gradients_; }
  [[nodiscard]] RankStates& states() noexcept { return states_; }
  [[nodiscard]] RankWeights& weights() noexcept { return weights_; }

  /// Waits until every rank is here. For ranks that are known to come.
  void barrier() { castor::barrier(*passes_); }

  /// Same as ConsistencyCheck::weights_updated.
  void weights_updated(std::vector<WeightDigest> digests) {
    consistency_.weights_updated(std::move(digests));
  }

  // Every rank calls these two around a replacement of weights. Both throw as ConsistencyCheck.
  /// Waits until no rank reads the others' weights any more.
  void begin_load() { consistency_.check_load(); }
  /// Waits until all ranks have replaced their weights: each may read the others' again.
  void end_load(const StateStore& places) {
    consistency_.check_load();
    std::vector<const Payload*> weights;
    for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
      weights.push_back(&places.weights(ChunkId{static_cast<std::uint32_t>(i)}));
    }
    weights_.settle(weights);
  }

  /// Leaves the other ranks, because this run cannot go on here: nobody shall wait for it. From any
  /// thread.
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
  /// Returns where ranks reduce gradients, for reports: "device", or "host" with the reason.
  [[nodiscard]] const std::string& reduced_on() const noexcept { return reduced_on_; }
  /// Returns the device bytes of the communicators between devices that reduce.
  [[nodiscard]] std::size_t communicator_bytes() const noexcept {
    return communicators_ ? communicators_->bytes() : 0;
  }
  /// Returns the bytes of gradients and weights that this rank has sent to others.
  [[nodiscard]] std::uint64_t bytes_sent() const noexcept {
    return gradients_.figures().bytes_sent() + weights_.figures().bytes_sent();
  }
  /// Returns those of bytes_sent() that went to ranks of other machines, where each machine has
  /// host storage that its ranks share.
  [[nodiscard]] std::uint64_t bytes_crossed() const noexcept {
    return gradients_.figures().bytes_crossed() + weights_.figures().bytes_crossed();
  }
  /// Returns the time that gradients and weights took, added up; the two may have run beside each
  /// other.
  [[nodiscard]] std::chrono::nanoseconds time() const noexcept {
    return gradients_.figures().time() + weights_.figures().time();
  }

 private:
  const ChunkLayout& layout_;
  const std::shared_ptr<Collectives> passes_;
  const std::string link_;
  const std::string reduced_on_;
  const std::shared_ptr<Reservation> communicators_;
  ConsistencyCheck consistency_;
  RankGradients gradients_;
  RankStates states_;
  RankWeights weights_;
  std::atomic<bool> left_ = false;
};

}  // namespace castor
