#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/collectives.h"
#include "core/device_reduction.h"
#include "core/payload.h"
#include "host/shared_host_storage.h"
#include "ranks/device_staging.h"
#include "ranks/rank_figures.h"

namespace castor {

/// Writes `own` to the memory that all ranks have in common. `own` is a range of weights whose host
/// storage is shared; it lies where the payload is now, in memory that the host addresses.
void share_bytes(const SharedHostStorage& shared_storage, const Payload& weights,
                 std::span<const std::byte> own);

/// Gathers weights of which each rank has updated its shard (ShardMap).
///
/// If ranks of a machine share host storage, each updates its shard in the common memory, and
/// nothing is sent within the machine. All ranks see the shards from the barrier after the update
/// on. Shards for other machines are exchanged before that barrier, each once (InterNodeGroup). The
/// callers must agree that a rank may write there at all: no other rank reads the weights between
/// the barriers before and after an update, or a load.
///
/// Elsewhere the shards are gathered: (n-1)/n of the bytes are sent. Weights in memory of a device
/// that the host does not address pass through DeviceStaging.
///
/// Shards of weights that every rank has on its device are gathered there, where devices do that.
/// Shared host storage of such weights is given the shards as well.
///
/// Owned by the session. Used by one thread at a time, the one that runs updates. Every rank runs
/// the same updates in the same order.
class RankWeights {
 public:
  /// Takes `ranks`, which are used for nothing else; `shared_storage`, which outlives this and is
  /// nullptr where ranks share no host storage; `staging` for the weights; and `gathers`, nullptr
  /// where all goes through the host.
  RankWeights(std::shared_ptr<Collectives> ranks, const SharedHostStorage* shared_storage,
              DeviceStaging staging = {}, std::shared_ptr<DeviceReduction> gathers = nullptr)
      : ranks_(std::move(ranks)),
        shared_storage_(shared_storage),
        staging_(std::move(staging)),
        gathers_(std::move(gathers)) {
    ranks_->set_place("brings together weights that an update, or a load, has changed");
  }

  /// Returns the memory in which this rank's shard of the weights is to be updated, as the address
  /// of the full weights. Values that were written to the shard outside of updates are kept.
  [[nodiscard]] std::byte* begin_update(const Payload& weights);
  /// Writes this rank's shard of weights in a copy of its own (Payload::take_copy) to the common
  /// memory, before the copy is dropped. No effect where there is none.
  void publish_copy(const Payload& weights);
  /// Replaces each shard of the weights by that of the rank that has updated it.
  void gather(std::span<const Payload* const> weights);
  /// Gives all ranks each rank's shard of weights that were written outside of updates. No effect
  /// where host storage is not shared.
  void settle(std::span<const Payload* const> weights);

  /// Leaves the ranks. Any thread may call it.
  void leave() noexcept {
    ranks_->leave();
    if (gathers_) {
      gathers_->leave();
    }
  }

  [[nodiscard]] const RankFigures& figures() const noexcept { return figures_; }

 private:
  [[nodiscard]] bool shared(const Payload& weights) const noexcept {
    return shared_storage_ != nullptr && shared_storage_->contains(weights.storage());
  }
  /// Writes this rank's shard to the common memory.
  void share_own(const Payload& weights);
  /// Returns this rank's shard.
  [[nodiscard]] std::span<std::byte> shard_of(std::span<std::byte> weights) const {
    const std::size_t shard = weights.size() / ranks_->size();
    return weights.subspan(ranks_->rank() * shard, shard);
  }
  [[nodiscard]] std::span<std::byte> shard_of(const Payload& weights) const {
    return shard_of(std::span(weights.data(), weights.bytes()));
  }
  void gather_shards(const Payload& weights);
  void gather_on_device(const Payload& weights);
  // Returns for each of the weights whether every rank has it on its device. Every rank is here.
  [[nodiscard]] std::vector<bool> on_all_devices(std::span<const Payload* const> weights);
  // Of weights with shared host storage, for which all ranks give their shards.
  void take_remote_shards(std::span<const Payload* const> weights);
  void take_remote_shards(const Payload& weights);
  void exchange_between_nodes(std::span<const Payload* const> weights);

  const std::shared_ptr<Collectives> ranks_;
  const SharedHostStorage* const shared_storage_;
  DeviceStaging staging_;
  const std::shared_ptr<DeviceReduction> gathers_;
  RankFigures figures_;
};

}  // namespace castor
