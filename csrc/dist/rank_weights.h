#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "core/collectives.h"
#include "core/payload.h"
#include "dist/device_staging.h"
#include "dist/rank_figures.h"
#include "host/shared_homes.h"

namespace castor {

/// These bytes of weights with a shared home become what all ranks have, at home or away from it;
/// they lie where the payload is now.
void share_bytes(const SharedHomes& homes, const Payload& weights, std::span<const std::byte> own);

/// Brings the weights together of which each rank has updated its part (ShardMap).
///
/// Where ranks of a machine share homes, a part is updated in the common memory, and nothing is
/// sent within it: from the meeting after it on, all see it. With other machines the parts are
/// exchanged before that meeting, each once (InterNodeGroup). That a rank may write there at all is
/// the callers' agreement: no other reads the weights from the meeting before an update, or a load,
/// to the one after it. Elsewhere the parts are gathered: (n-1)/n of the bytes are sent. Weights in
/// memory of a device that the host does not address pass through DeviceStaging.
///
/// Owned by the session; used by the one thread at a time that runs updates, which on every rank
/// are the same, in the same order.
class RankWeights {
 public:
  /// `ranks`: for nothing else. `homes`: nullptr where ranks share none; outlives this. `staging`:
  /// of weights.
  RankWeights(std::shared_ptr<Collectives> ranks, const SharedHomes* homes,
              DeviceStaging staging = {})
      : ranks_(std::move(ranks)), homes_(homes), staging_(std::move(staging)) {
    ranks_->set_place("brings together weights that an update, or a load, has changed");
  }

  /// Where this rank's part of the weights is updated, as an address of all of them. What others
  /// than updates have written there counts.
  [[nodiscard]] std::byte* begin_update(const Payload& weights);
  /// The weights' parts become those of the ranks that have updated them.
  void gather(std::span<const Payload* const> weights);
  /// Each rank's part of weights that others than updates have written becomes what all have.
  /// No effect where homes are not shared.
  void settle(std::span<const Payload* const> weights);

  /// From any thread.
  void leave() noexcept { ranks_->leave(); }

  [[nodiscard]] const RankFigures& figures() const noexcept { return figures_; }

 private:
  [[nodiscard]] bool shared(const Payload& weights) const noexcept {
    return homes_ != nullptr && homes_->contains(weights.home());
  }
  /// This rank's.
  [[nodiscard]] std::span<std::byte> part_of(std::span<std::byte> weights) const {
    const std::size_t part = weights.size() / ranks_->size();
    return weights.subspan(ranks_->rank() * part, part);
  }
  [[nodiscard]] std::span<std::byte> part_of(const Payload& weights) const {
    return part_of(std::span(weights.data(), weights.bytes()));
  }
  void gather_parts(const Payload& weights);
  // Of those with shared homes, where all give their parts.
  void take_others_parts(std::span<const Payload* const> weights);
  void take_others_parts(const Payload& weights) const;
  void exchange_between_nodes(std::span<const Payload* const> weights);

  const std::shared_ptr<Collectives> ranks_;
  const SharedHomes* const homes_;
  DeviceStaging staging_;
  RankFigures figures_;
};

}  // namespace castor
