#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/ids.h"

namespace castor {

/// Next use of a chunk that this step will not touch again.
inline constexpr std::uint64_t kNeverUsed = ~std::uint64_t{0};

/// The chunks that may leave the device, ordered by how little their leaving costs: the furthest
/// next use first (Belady 1966), weighted by what a byte's return costs. Chunks that are not used
/// again cost nothing and go first; ties go by id, so that every run takes the same decisions.
/// Shared by the planner, which simulates with it, and the chunk manager, which acts on it.
/// Not thread-safe. put, remove, victim are O(log chunks).
class EvictionOrder {
 public:
  explicit EvictionOrder(std::size_t num_chunks) : entries_(num_chunks) {}

  /// Adds or moves a chunk. `cost_per_byte` > 0 is relative: 1 for a clean copy whose home is host
  /// memory, more where a write-back or a slower tier is involved.
  void put(ChunkId chunk, std::uint64_t next_use, double cost_per_byte = 1.0);
  void remove(ChunkId chunk) noexcept;
  [[nodiscard]] bool contains(ChunkId chunk) const { return entries_[index(chunk)].has_value(); }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }

  /// The cheapest chunk to evict at access `now`; nullopt when there is none.
  [[nodiscard]] std::optional<ChunkId> victim(std::uint64_t now) const;
  /// As victim, but only a chunk whose next use is `horizon` or later.
  [[nodiscard]] std::optional<ChunkId> victim_from(std::uint64_t now, std::uint64_t horizon) const;

 private:
  // Ordered so that the last element has the furthest next use and, among equals, the lowest id.
  using Key = std::pair<std::uint64_t, std::uint32_t>;
  struct CostClass {
    double cost_per_byte;
    std::set<Key> chunks;
  };
  struct Entry {
    std::size_t cost_class;
    Key key;
  };
  std::size_t class_of(double cost_per_byte);

  std::vector<CostClass> classes_;  // few: one per distinct cost
  std::vector<std::optional<Entry>> entries_;
  std::size_t size_ = 0;
};

}  // namespace castor
