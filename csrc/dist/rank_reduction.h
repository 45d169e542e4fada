#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "core/collectives.h"
#include "core/executor.h"
#include "core/memory_tier.h"
#include "core/payload.h"
#include "core/scalar_type.h"
#include "dist/device_staging.h"
#include "dist/rank_figures.h"
#include "host/shared_homes.h"

namespace castor {

/// Makes gradients the mean of those that the ranks have, on every rank: each adds up a part of
/// them, in rank order.
///
/// Where their homes are shared, every rank has its gradients in pages of its own, writes its part
/// of the mean to the common memory, and forgets those pages when all have: (n-1)/n of the bytes
/// are sent. Between machines that have homes each, sums in fp32 go from one to the next, each adds
/// its ranks', and the mean comes back from the last: so the order is that of all ranks. Elsewhere
/// all gather the parts: twice that; or each keeps its part. One window of memory is needed.
/// Gradients in memory of a device that the host does not address pass through DeviceStaging.
///
/// Used by one thread at a time.
class RankReduction {
 public:
  /// `homes`: nullptr where ranks share none; `window`: of window_bytes; `staging`: of gradients.
  /// All outlive this.
  RankReduction(Collectives& ranks, const SharedHomes* homes, Executor& executor, Block window,
                RankFigures& figures, DeviceStaging staging = {})
      : ranks_(ranks),
        homes_(homes),
        executor_(executor),
        window_(std::move(window)),
        figures_(figures),
        staging_(std::move(staging)) {}

  /// For gradients of at most so many bytes at once, of these ranks; `homes`: as above.
  [[nodiscard]] static std::size_t window_bytes(std::size_t largest, Collectives& ranks,
                                                const SharedHomes* homes);

  void reduce(const Payload& gradients, ScalarType type);
  /// The mean of this rank's part alone goes into `part`, apart from `gradients`: a reduce-scatter,
  /// (n-1)/n of the bytes.
  void reduce_part(std::span<const std::byte> gradients, std::span<std::byte> part,
                   ScalarType type);

 private:
  void exchange(const Payload& gradients, std::span<std::byte> all, ScalarType type, bool shared);

  Collectives& ranks_;
  const SharedHomes* const homes_;
  Executor& executor_;
  Block window_;
  RankFigures& figures_;
  DeviceStaging staging_;
};

}  // namespace castor
