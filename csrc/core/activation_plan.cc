#include "core/activation_plan.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace castor {
namespace {

void check(const RecordedStep& step, std::span<const RecomputedSpan> kept) {
  if (step.compute_seconds.size() != step.events.size()) {
    throw InvalidArgument("a step of " + std::to_string(step.events.size()) + " events with " +
                          std::to_string(step.compute_seconds.size()) + " durations");
  }
  for (const RecomputedSpan& span : kept) {
    if (span.forward_begin > span.forward_end || span.forward_end > span.again_begin ||
        span.again_begin > span.again_end || span.again_end > step.events.size() ||
        span.away_begin > span.away_end || span.away_end > span.again_begin) {
      throw InvalidArgument("events " + std::to_string(span.forward_begin) + " to " +
                            std::to_string(span.forward_end) + " and " +
                            std::to_string(span.again_begin) + " to " +
                            std::to_string(span.again_end) + " are no two forwards of a step of " +
                            std::to_string(step.events.size()));
    }
  }
}

std::uint64_t above(std::uint64_t bytes, std::uint64_t base) {
  return bytes > base ? bytes - base : 0;
}

/// Of what a span keeps, at an event before its second forward.
std::uint64_t more_bytes(const std::vector<Event>& events, const RecomputedSpan& span,
                         std::size_t i) {
  const std::size_t num_again = span.again_end - span.again_begin;
  if (num_again > 0 && i + 1 == span.again_begin) {  // the backward that goes on behind it as well
    const std::uint64_t behind = events[span.again_end - 1].nonmodel_bytes;
    return std::max(span.kept_bytes, above(behind, events[i].nonmodel_bytes));
  }
  const std::size_t nth = i - span.forward_begin;
  if (i + 1 < span.forward_end && nth + 1 < num_again) {
    return above(above(events[span.again_begin + nth].nonmodel_bytes, span.again_base),
                 above(events[i].nonmodel_bytes, span.forward_base));
  }
  return span.kept_bytes;
}

}  // namespace

RecordedStep keep_activations(const RecordedStep& step, std::span<const RecomputedSpan> kept) {
  check(step, kept);
  std::vector<Event> events = step.events;
  std::vector<double> seconds = step.compute_seconds;
  std::vector<bool> dropped(events.size(), false);
  for (const RecomputedSpan& span : kept) {
    const std::size_t num_again = span.again_end - span.again_begin;
    for (std::size_t i = span.forward_begin; i < span.again_begin; ++i) {
      if (span.away_begin <= i && i < span.away_end) {
        events[i].nonmodel_bytes = above(events[i].nonmodel_bytes, span.input_bytes);
      } else {
        events[i].nonmodel_bytes += more_bytes(step.events, span, i);
      }
    }
    for (std::size_t i = span.again_begin; i < span.again_end; ++i) {
      if (dropped[i]) {
        throw InvalidArgument("two second forwards have event " + std::to_string(i));
      }
      dropped[i] = true;
    }
    if (num_again > 0 && span.again_begin > 0) {  // what asked for the second one goes on behind it
      seconds[span.again_begin - 1] += seconds[span.again_end - 1];
    }
  }
  RecordedStep result;
  std::uint64_t skipped_ns = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const std::uint64_t next_ns =
        i + 1 < events.size() ? step.events[i + 1].time_ns : step.events[i].time_ns;
    if (dropped[i]) {
      skipped_ns += above(next_ns, step.events[i].time_ns);
      continue;
    }
    events[i].time_ns -= skipped_ns;
    result.events.push_back(events[i]);
    result.compute_seconds.push_back(seconds[i]);
  }
  return result;
}

}  // namespace castor
