#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/trace.h"

namespace castor {

/// A part of a model that a recorded step ran twice: its activations were not kept, and backward
/// ran its forward again. Positions are those of the step's events; a range may be empty.
struct RecomputedSpan {
  std::size_t forward_begin = 0;   ///< first event of the first forward
  std::size_t forward_end = 0;     ///< first event behind it
  std::size_t again_begin = 0;     ///< first event of the second forward, in backward
  std::size_t again_end = 0;       ///< first event behind it, which may be the last of the step
  std::uint64_t forward_base = 0;  ///< non-model bytes when the first forward began
  std::uint64_t again_base = 0;    ///< ... when the second one did
  std::uint64_t kept_bytes = 0;    ///< what the second one left for backward
  std::size_t away_begin = 0;      ///< first event at which these wait in host memory; 0 if never
  std::size_t away_end = 0;        ///< first event at which they do not any more
  std::uint64_t input_bytes = 0;   ///< of the first forward, which wait there too
};

/// A training step: its events and, for each, seconds of computing until the next.
struct RecordedStep {
  std::vector<Event> events;
  std::vector<double> compute_seconds;
};

/// The step as it had been if the activations of `kept` had been kept: without the second forwards,
/// and with their bytes from the first ones on, but for where they are away. A pure function,
/// O(events + kept x events of each).
///
/// In a first forward bytes grow as they did in the second; behind the event at which the second
/// one stopped, for it stops at the last tensor that backward needs, all are there.
///
/// Throws InvalidArgument where sizes differ, or spans overlap or do not lie in the step.
[[nodiscard]] RecordedStep keep_activations(const RecordedStep& step,
                                            std::span<const RecomputedSpan> kept);

}  // namespace castor
