#pragma once

// Internal to csrc/cuda; contains nothing but plain C++.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/ordered_sum.h"
#include "cuda/segment_batch.h"
#include "optim/elementwise.h"
#include "optim/gradient.h"
#include "optim/rounding.h"

namespace castor::cuda {

/// Threads of a block of the first stage; kNormLanes of them add a block of kNormBlock elements.
inline constexpr unsigned kNormThreads = 256;
inline constexpr std::size_t kNormBlocksOfTile = kNormThreads / kNormLanes;
/// Elements of a segment that a thread block of the first stage adds.
inline constexpr std::size_t kNormTile = kNormBlocksOfTile * kNormBlock;

/// A NormSegment that knows where its sum goes.
struct NumberedSegment {
  const void* data = nullptr;
  std::size_t numel = 0;
  std::uint32_t index = 0;
  ScalarType type = ScalarType::kFloat32;

  [[nodiscard]] CASTOR_ELEMENTWISE std::size_t num_blocks() const noexcept {
    return (numel + kNormBlock - 1) / kNormBlock;
  }
};

/// Segments of the two launches that compute their sums. Thread block b of the first writes the
/// sums of its kNormBlocksOfTile blocks of elements from b * kNormBlocksOfTile of the workspace on;
/// thread block s of the second adds those of segment s.
using NormBatch = SegmentBatch<NumberedSegment>;

/// Throws InvalidArgument for a segment with elements and no data, or whose type has no arithmetic.
inline void check_segments(std::span<const NormSegment> segments) {
  for (const NormSegment& segment : segments) {
    if (segment.numel == 0)
      continue;
    if (segment.data == nullptr) {
      throw InvalidArgument("square_norms: a segment of " + std::to_string(segment.numel) + " " +
                            std::string(to_string(segment.type)) + " elements has no data");
    }
    if (segment.type == ScalarType::kUInt8)
      throw_no_arithmetic(segment.type);
  }
}

/// Returns the batches that cover `segments`. Segments of no elements are left out.
[[nodiscard]] inline std::vector<NormBatch> norm_batches(std::span<const NormSegment> segments) {
  std::vector<NumberedSegment> numbered;
  numbered.reserve(segments.size());
  for (const NormSegment& segment : segments) {
    numbered.push_back({.data = segment.data,
                        .numel = segment.numel,
                        .index = static_cast<std::uint32_t>(numbered.size()),
                        .type = segment.type});
  }
  return make_batches<NumberedSegment>(numbered, kNormTile);
}

/// Returns the doubles of workspace for a batch, or for all batches of segments.
[[nodiscard]] inline std::size_t workspace_of(const NormBatch& batch) noexcept {
  return batch.num_tiles * kNormBlocksOfTile;
}
[[nodiscard]] inline std::size_t workspace_of(std::span<const NormSegment> segments) noexcept {
  std::size_t num_tiles = 0;
  for (const NormSegment& segment : segments)
    num_tiles += (segment.numel + kNormTile - 1) / kNormTile;
  return num_tiles * kNormBlocksOfTile;
}

/// Sum of squares of one lane of one block of kNormBlock elements (optim/gradient.h). A tensor's
/// last block has fewer.
template <ScalarType type>
struct LaneSquares {
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;
  /// Elements whose loads a thread has under way at once.
  static constexpr std::size_t kUnroll = 8;

  CASTOR_ELEMENTWISE static double sum(const Storage* block, std::size_t count,
                                       std::size_t lane) noexcept {
    double sum = 0.0;
    std::size_t i = lane;
    for (; i + (kUnroll - 1) * kNormLanes < count; i += kUnroll * kNormLanes) {
      Storage loaded[kUnroll];
      for (std::size_t k = 0; k < kUnroll; ++k)
        loaded[k] = block[i + k * kNormLanes];
      for (std::size_t k = 0; k < kUnroll; ++k)
        add(sum, loaded[k]);
    }
    for (; i < count; i += kNormLanes)
      add(sum, block[i]);
    return sum;
  }

 private:
  CASTOR_ELEMENTWISE static void add(double& sum, Storage element) noexcept {
    const double value = Codec::load(element);
    sum += value * value;
  }
};

/// Returns the sum of one lane of a segment's block that begins at element `begin`; 0 behind the
/// segment's end.
[[nodiscard]] CASTOR_ELEMENTWISE double lane_squares(const NumberedSegment& segment,
                                                     std::size_t begin, std::size_t lane) noexcept {
  if (begin >= segment.numel)
    return 0.0;
  const std::size_t left = segment.numel - begin;
  const std::size_t count = left < kNormBlock ? left : kNormBlock;
  switch (segment.type) {
    case ScalarType::kFloat32:
      return LaneSquares<ScalarType::kFloat32>::sum(static_cast<const float*>(segment.data) + begin,
                                                    count, lane);
    case ScalarType::kBFloat16:
      return LaneSquares<ScalarType::kBFloat16>::sum(
          static_cast<const std::uint16_t*>(segment.data) + begin, count, lane);
    case ScalarType::kFloat16:
      return LaneSquares<ScalarType::kFloat16>::sum(
          static_cast<const std::uint16_t*>(segment.data) + begin, count, lane);
    case ScalarType::kUInt8: break;  // check_segments has refused it
  }
  return 0.0;
}

// The second stage adds a segment's blocks from first to last. One thread adds the first ones, in
// which the total passes most of its powers of two. After that the thread block goes in rounds of
// kOrderedThreads * kOrderedUnroll.

inline constexpr unsigned kOrderedThreads = 1024;
inline constexpr unsigned kOrderedUnroll = 4;
inline constexpr std::size_t kOrderedRound = std::size_t{kOrderedThreads} * kOrderedUnroll;
/// Number of blocks that one thread adds.
inline constexpr std::size_t kAddedSingly = 128;

/// Total of the first `begin` sums of a segment.
struct RunningTotal {
  double total;
  std::size_t begin;
};

/// A thread's part of a round: kOrderedUnroll sums from `begin` on.
struct OrderedPart {
  double addends[kOrderedUnroll];
  std::size_t begin;

  CASTOR_ELEMENTWISE static OrderedPart load(const double* sums, std::size_t num_sums,
                                             std::size_t round_begin, unsigned thread) noexcept {
    OrderedPart part{};
    part.begin = round_begin + std::size_t{thread} * kOrderedUnroll;
    for (unsigned k = 0; k < kOrderedUnroll; ++k)
      part.addends[k] = part.begin + k < num_sums ? sums[part.begin + k] : 0.0;
    return part;
  }

  [[nodiscard]] CASTOR_ELEMENTWISE Additions additions(std::uint32_t exponent) const noexcept {
    Additions all{0, 0};
    for (unsigned k = 0; k < kOrderedUnroll; ++k)
      all = then(all, additions_of(addends[k], exponent));
    return all;
  }

  /// Adds this part to the round's total before it, of which `before` are the additions. Returns
  /// whether this is the thread whose `now` ends the round: the one in whose part the total comes
  /// to the next power of two, or the last one if none does.
  CASTOR_ELEMENTWISE bool ends_round(Units total, Additions before, bool is_last,
                                     RunningTotal& now) const noexcept {
    std::uint64_t count = after(total.count, before);
    if (count >= kEndOfUnits)
      return false;
    for (unsigned k = 0; k < kOrderedUnroll; ++k) {
      const std::uint64_t next = after(count, additions_of(addends[k], total.exponent));
      if (next >= kEndOfUnits) {
        now = {value_of({count, total.exponent}) + addends[k], begin + k + 1};
        return true;
      }
      count = next;
    }
    now = {value_of({count, total.exponent}), begin + kOrderedUnroll};
    return is_last;
  }
};

/// Returns whether rounds may go on from a total: not from an infinity or NaN.
[[nodiscard]] CASTOR_ELEMENTWISE bool has_units(double total) noexcept {
  return total - total == 0.0;
}

}  // namespace castor::cuda
