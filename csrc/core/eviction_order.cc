#include "core/eviction_order.h"

#include <limits>

namespace castor {
namespace {

std::uint32_t reversed(ChunkId chunk) { return ~static_cast<std::uint32_t>(chunk); }

double score(std::uint64_t next_use, std::uint64_t now, double cost_per_byte) {
  if (next_use == kNeverUsed) {
    return std::numeric_limits<double>::infinity();
  }
  const std::uint64_t distance = next_use > now ? next_use - now : 0;
  return static_cast<double>(distance) / cost_per_byte;
}

}  // namespace

std::size_t EvictionOrder::class_of(double cost_per_byte) {
  for (std::size_t i = 0; i < classes_.size(); ++i) {
    if (classes_[i].cost_per_byte == cost_per_byte) {
      return i;
    }
  }
  classes_.push_back({cost_per_byte, {}});
  return classes_.size() - 1;
}

void EvictionOrder::put(ChunkId chunk, std::uint64_t next_use, double cost_per_byte) {
  remove(chunk);
  const Entry entry{class_of(cost_per_byte), {next_use, reversed(chunk)}};
  classes_[entry.cost_class].chunks.insert(entry.key);
  entries_[index(chunk)] = entry;
  ++size_;
}

void EvictionOrder::remove(ChunkId chunk) noexcept {
  auto& entry = entries_[index(chunk)];
  if (entry) {
    classes_[entry->cost_class].chunks.erase(entry->key);
    entry.reset();
    --size_;
  }
}

std::optional<ChunkId> EvictionOrder::victim(std::uint64_t now) const {
  return victim_from(now, 0);
}

std::optional<ChunkId> EvictionOrder::victim_from(std::uint64_t now, std::uint64_t horizon) const {
  std::optional<ChunkId> best;
  double best_score = -1.0;
  for (const CostClass& cost_class : classes_) {
    if (cost_class.chunks.empty()) {
      continue;
    }
    const auto& [next_use, id] = *cost_class.chunks.rbegin();
    const double candidate = score(next_use, now, cost_class.cost_per_byte);
    const ChunkId chunk{~id};
    if (next_use >= horizon &&
        (candidate > best_score || (candidate == best_score && chunk < *best))) {
      best = chunk;
      best_score = candidate;
    }
  }
  return best;
}

}  // namespace castor
