#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/trace.h"

namespace castor {

/// Part of a model that a recorded step ran twice: its activations were not saved for backward, and
/// backward ran its forward again. Positions are indices of the step's events; a range may be
/// empty.
struct RecomputedSpan {
  std::size_t forward_begin = 0;   ///< first event of the first forward
  std::size_t forward_end = 0;     ///< first event after the first forward
  std::size_t again_begin = 0;     ///< first event of the second forward, in backward
  std::size_t again_end = 0;       ///< first event after the second forward, or the event count
  std::uint64_t forward_base = 0;  ///< non-model bytes when the first forward began
  std::uint64_t again_base = 0;    ///< non-model bytes when the second forward began
  std::uint64_t kept_bytes = 0;    ///< bytes that the second forward left for backward
  std::size_t away_begin = 0;      ///< first event with these bytes in host memory; 0 if never
  std::size_t away_end = 0;        ///< first event with them on the device again
  std::uint64_t input_bytes = 0;   ///< bytes of the first forward's inputs, in host memory as long
};

/// A training step: its events and, for each of them, the seconds of computing until the next.
struct RecordedStep {
  std::vector<Event> events;
  std::vector<double> compute_seconds;
};

/// Returns the step as it would have run if the activations of the spans in `kept` had been saved
/// for backward. The second forwards are left out. Their bytes count from the first forwards on,
/// except while they are in host memory. A pure function, O(events + kept x events of each).
///
/// In a first forward the bytes grow as they did in the second one. The second one stops at the
/// last tensor that backward needs; after the event at which it stopped, all its bytes are there.
///
/// Throws InvalidArgument where sizes differ, where spans overlap, or where a span does not lie in
/// the step.
[[nodiscard]] RecordedStep keep_activations(const RecordedStep& step,
                                            std::span<const RecomputedSpan> kept);

}  // namespace castor
