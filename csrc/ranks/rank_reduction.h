#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "core/chunk_layout.h"
#include "core/collectives.h"
#include "core/device_reduction.h"
#include "core/executor.h"
#include "core/memory_tier.h"
#include "core/payload.h"
#include "core/scalar_type.h"
#include "core/units.h"
#include "host/shared_host_storage.h"
#include "ranks/device_staging.h"
#include "ranks/rank_figures.h"

namespace castor {

/// Averages gradients over the ranks, on every rank: each rank adds up a shard of them in rank
/// order, on the host, or the ranks' devices do (DeviceReduction).
///
/// - Where the ranks share host storage, every rank has its gradients in pages of its own. It
///   writes its shard of the mean to the common memory, and forgets those pages when all ranks have
///   written theirs. (n-1)/n of the bytes are sent.
/// - Between machines with host storage each, sums in fp32 go from one machine to the next, and
///   each adds its ranks' gradients. The mean comes back from the last (GradientRelay). So the
///   order is that of all ranks.
/// - Elsewhere all ranks gather the shards, which sends twice as much; or each rank keeps its shard
///   (reduce_scatter).
/// - Gradients that are in memory of the device on every rank are reduced there, where devices
///   reduce.
///
/// One window of memory is needed. Gradients in memory of a device that the host does not address
/// pass through DeviceStaging. Used by one thread at a time.
class RankReduction {
 public:
  /// Takes `shared_storage`, nullptr where ranks share no host storage; `window`, of window_bytes;
  /// `staging` for the gradients; and `sums`, nullptr where the host adds up. All outlive this.
  RankReduction(Collectives& ranks, const SharedHostStorage* shared_storage, Executor& executor,
                Block window, RankFigures& figures, DeviceStaging staging = {},
                DeviceReduction* sums = nullptr)
      : ranks_(ranks),
        shared_storage_(shared_storage),
        executor_(executor),
        window_(std::move(window)),
        figures_(figures),
        staging_(std::move(staging)),
        sums_(sums) {}

  /// At most so many bytes of a gradient are on their way at once.
  static constexpr std::size_t kMostPieceBytes = std::size_t{8} << 20;
  /// Returns the bytes in which gradients of at most `largest` bytes are exchanged, a piece after
  /// the other: each rank's shard of a piece is whole elements, and begins where a cache line does.
  [[nodiscard]] static std::size_t piece_bytes(std::size_t largest, std::size_t ranks,
                                               std::size_t most = kMostPieceBytes) {
    return align_up(std::clamp<std::size_t>(largest, 1, most), ranks * kParamAlignment);
  }
  /// Returns the bytes of the window for gradients of at most `largest` bytes at once, of so many
  /// ranks, of which `sharing` on each machine share host storage; 1: none do. Sums on devices
  /// need room for a shard alone.
  [[nodiscard]] static std::size_t window_bytes(std::size_t largest, std::size_t ranks,
                                                std::size_t sharing, ReducedOn where);

  /// Averages `gradients`, and drops their own copy (Payload::take_copy). Throws OutOfMemory where
  /// they are on a device and their host storage is shared: they pass through such a copy.
  /// `gathered`: this rank's values, where they are in memory of the device and only their mean
  /// goes to the payload; empty: the payload has them. Requires sums on devices where it is not
  /// empty; ranks may differ in that.
  void reduce(Payload& gradients, ScalarType type, std::span<const std::byte> gathered = {});
  /// Writes the mean of this rank's shard alone into `shard`, apart from `gradients`: a
  /// reduce-scatter, which sends (n-1)/n of the bytes. `from`: the memory that `gradients` are in;
  /// kDevice requires sums on devices.
  void reduce_scatter(std::span<const std::byte> gradients, DeviceReduction::From from,
                      std::span<std::byte> shard, ScalarType type);

 private:
  void exchange(const Payload& gradients, std::span<const std::byte> on_device,
                std::span<std::byte> all, ScalarType type, bool shared);
  void sum_piece(std::span<const std::byte> on_device, std::span<std::byte> piece,
                 std::size_t begin, std::span<std::byte> own, ScalarType type);

  Collectives& ranks_;
  const SharedHostStorage* const shared_storage_;
  Executor& executor_;
  Block window_;
  RankFigures& figures_;
  DeviceStaging staging_;
  DeviceReduction* const sums_;
};

}  // namespace castor
