#include "io/extent_allocator.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "core/error.h"

namespace castor {

ExtentAllocator::ExtentAllocator(std::uint64_t capacity, std::uint64_t alignment)
    : capacity_(0), alignment_(alignment) {
  if (alignment == 0) {
    throw InvalidArgument("extents cannot be aligned to 0 bytes; give 1 or more");
  }
  capacity_ = capacity / alignment * alignment;
  if (capacity_ > 0) {
    add_free(0, capacity_);
  }
}

std::optional<Extent> ExtentAllocator::try_allocate(std::uint64_t bytes) {
  if (bytes == 0) {
    throw InvalidArgument("an extent cannot have 0 bytes");
  }
  if (bytes > capacity_) {
    return std::nullopt;  // also keeps the rounding below from wrapping
  }
  const std::uint64_t rounded = (bytes + alignment_ - 1) / alignment_ * alignment_;
  const auto fit = free_by_size_.lower_bound({rounded, 0});
  if (fit == free_by_size_.end()) {
    return std::nullopt;
  }
  const auto [range_bytes, offset] = *fit;
  remove_free(free_by_offset_.find(offset));
  if (range_bytes > rounded) {
    add_free(offset + rounded, range_bytes - rounded);
  }
  allocated_.emplace(offset, rounded);
  used_bytes_ += rounded;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return Extent{offset, rounded};
}

void ExtentAllocator::free(const Extent& extent) {
  const auto found = allocated_.find(extent.offset);
  if (found == allocated_.end() || found->second != extent.bytes) {
    throw InvalidArgument("the extent of " + std::to_string(extent.bytes) + " bytes at byte " +
                          std::to_string(extent.offset) + " is not allocated");
  }
  allocated_.erase(found);
  used_bytes_ -= extent.bytes;
  std::uint64_t offset = extent.offset;
  std::uint64_t bytes = extent.bytes;
  const auto after = free_by_offset_.lower_bound(offset);
  if (after != free_by_offset_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove_free(before);
    }
  }
  if (after != free_by_offset_.end() && after->first == extent.end()) {
    bytes += after->second;
    remove_free(after);
  }
  add_free(offset, bytes);
}

std::uint64_t ExtentAllocator::largest_free() const noexcept {
  return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

void ExtentAllocator::add_free(std::uint64_t offset, std::uint64_t bytes) {
  free_by_offset_.emplace(offset, bytes);
  free_by_size_.emplace(bytes, offset);
}

void ExtentAllocator::remove_free(std::map<std::uint64_t, std::uint64_t>::iterator range) {
  free_by_size_.erase({range->second, range->first});
  free_by_offset_.erase(range);
}

}  // namespace castor
