#pragma once

// Internal to csrc/optim.

#include <cstddef>
#include <span>
#include <vector>

#include "core/executor.h"
#include "optim/state_format.h"

namespace castor::detail {

/// Number of elements that a task updates: 256 KiB of each fp32 array, long enough to hide a task's
/// cost and short enough to balance the threads.
inline constexpr std::size_t kTaskElements = 64 * 1024;

/// Cost of starting a segment, in elements: bounds the segments of a task.
inline constexpr std::size_t kSegmentCost = 64;

/// Number of elements; a long segment is cut at multiples of it, so that tasks share neither cache
/// lines nor blocks.
inline constexpr std::size_t kCutElements = kMomentBlock;

struct PieceCursor {
  std::size_t segment;
  std::size_t offset;
};

/// Cuts the segments, in order, into tasks of about kTaskElements, and returns the beginning of
/// each task.
template <typename Segment>
[[nodiscard]] std::vector<PieceCursor> cut_into_tasks(std::span<const Segment> segments) {
  std::vector<PieceCursor> begins;
  std::size_t room = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    for (std::size_t offset = 0; offset < segments[i].numel;) {
      if (room < kSegmentCost + kCutElements) {
        begins.push_back({i, offset});
        room = kTaskElements + kSegmentCost;
      }
      room -= kSegmentCost;
      const std::size_t left = segments[i].numel - offset;
      const std::size_t taken = left <= room ? left : room / kCutElements * kCutElements;
      offset += taken;
      room -= taken;
    }
  }
  return begins;
}

/// Calls update(segment, begin, count) for pieces that make up all elements, in tasks on
/// `executor`. Segments have a `numel`.
template <typename Segment, typename Update>
void for_each_piece(Executor& executor, std::span<const Segment> segments, const Update& update) {
  const std::vector<PieceCursor> begins = cut_into_tasks(segments);
  executor.parallel_for(begins.size(), [&](std::size_t task) {
    const PieceCursor end =
        task + 1 < begins.size() ? begins[task + 1] : PieceCursor{segments.size(), 0};
    PieceCursor at = begins[task];
    for (; at.segment < end.segment; at = {at.segment + 1, 0}) {
      const Segment& segment = segments[at.segment];
      update(segment, at.offset, segment.numel - at.offset);
    }
    if (at.offset < end.offset) {
      update(segments[at.segment], at.offset, end.offset - at.offset);
    }
  });
}

}  // namespace castor::detail
