#pragma once

#include <cstddef>
#include <cstdint>

#include "core/placement.h"

namespace castor {

/// Fate of a slot's bytes when it is freed: whether an operator that took its address just before
/// may still read them.
enum class FreedSlots : std::uint8_t {
  kKeepTheirBytes,  ///< until the next fetch (SlotArena)
  kReusedAtOnce,    ///< the next allocation may get them (a GPU's caching allocator)
};

struct RuntimeOptions {
  PlacementPolicy policy = PlacementPolicy::kAuto;
  std::size_t max_prefetch = 1;
  /// Share of the device budget left to non-model data while there is no trace yet, in [0, 1).
  double warmup_nonmodel_ratio = 0.8;
  /// Share of the device budget that plans may use, in (0, 1].
  double steady_cap_ratio = 1.0;
  /// Share, in [0, 1], that resident chunks may take of the budget beside non-model data. kAuto
  /// only.
  double margin_ratio = 1.0;
  FreedSlots freed_slots = FreedSlots::kKeepTheirBytes;
  /// Bytes that free slots may take of the memory that non-model data takes or that a plan leaves
  /// to it, but at most an eighth of the budget. Freeing so little is not worth the page faults of
  /// the next fetch.
  std::size_t kept_slot_bytes = std::size_t{128} << 20;
};

}  // namespace castor
