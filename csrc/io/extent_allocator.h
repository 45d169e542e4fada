#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace castor {

/// Range of a space, in bytes.
struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  [[nodiscard]] std::uint64_t end() const noexcept { return offset + bytes; }
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// Hands out ranges of [0, capacity): best fit, and the lowest offset among equals, so that the
/// same calls give the same extents. Offsets and sizes are multiples of the alignment. Adjacent
/// free ranges are merged. Bookkeeping only, no I/O; not thread-safe.
///
/// Invariant: free and allocated extents partition the space.
class ExtentAllocator {
 public:
  /// `capacity` is rounded down to the alignment. Throws InvalidArgument for an alignment of 0.
  ExtentAllocator(std::uint64_t capacity, std::uint64_t alignment);

  /// Returns an extent of at least `bytes`, rounded up to the alignment; nullopt when no free range
  /// is long enough. Throws InvalidArgument for 0 bytes.
  [[nodiscard]] std::optional<Extent> try_allocate(std::uint64_t bytes);
  /// Frees an extent. Throws InvalidArgument for one that try_allocate() did not return, or that
  /// was freed already.
  void free(const Extent& extent);

  [[nodiscard]] std::uint64_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::uint64_t alignment() const noexcept { return alignment_; }
  [[nodiscard]] std::uint64_t used_bytes() const noexcept { return used_bytes_; }
  [[nodiscard]] std::uint64_t peak_bytes() const noexcept { return peak_bytes_; }
  /// Returns the bytes of the longest extent that can be allocated now.
  [[nodiscard]] std::uint64_t largest_free() const noexcept;
  [[nodiscard]] std::size_t num_free_ranges() const noexcept { return free_by_offset_.size(); }

 private:
  void add_free(std::uint64_t offset, std::uint64_t bytes);
  void remove_free(std::map<std::uint64_t, std::uint64_t>::iterator range);

  std::uint64_t capacity_;
  std::uint64_t alignment_;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t peak_bytes_ = 0;
  std::map<std::uint64_t, std::uint64_t> free_by_offset_;           // offset -> bytes
  std::set<std::pair<std::uint64_t, std::uint64_t>> free_by_size_;  // (bytes, offset)
  std::map<std::uint64_t, std::uint64_t> allocated_;                // offset -> bytes
};

}  // namespace castor
