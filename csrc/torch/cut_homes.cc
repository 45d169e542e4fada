#include "torch/cut_homes.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {
namespace {

constexpr std::size_t kSlotAlignment = 64;

void check_alike(const RankGroups& ranks, const std::vector<bool>& cut) {
  const std::vector<std::size_t> all = gather(*ranks.passes, std::hash<std::vector<bool>>()(cut));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      throw UsageError("rank 0 and rank " + std::to_string(rank) +
                       " place chunks differently, and zero_stage=3 cuts the same ones on all: "
                       "give every rank the same device_memory and placement_policy, or "
                       "zero_stage=1");
    }
  }
}

}  // namespace

CutHomes::CutHomes(const ChunkLayout& layout, std::span<const Placement> placements,
                   const RankGroups& ranks, MemoryTier& host, Executor& executor) {
  const std::size_t size = ranks.passes->size();
  std::size_t bytes = 0;
  std::size_t largest = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const ChunkSpec& chunk = layout.chunks()[i];
    cut_.push_back(placements[i] != Placement::kDevice && chunk.used_bytes > 0);
    bytes += cut_[i] ? chunk.used_bytes / size : 0;
    largest = std::max(largest, cut_[i] ? chunk.used_bytes : 0);
  }
  check_alike(ranks, cut_);
  if (bytes == 0) {
    throw UsageError(
        "zero_stage=3 cuts weights that have their home on the host, and all of this model's are "
        "on the device: give placement_policy=\"auto\" or \"cpu\", or zero_stage=1");
  }
  memory_ = host.allocate(bytes,
                          "this rank's part of the weights has no room there; raise "
                          "host_memory, or train on more ranks");
  window_ = host.allocate(ChunkStream::memory_bytes(largest, kSlots, kSlotAlignment),
                          "weights that are in parts on several ranks come together in a window "
                          "there; raise host_memory, or make chunks smaller (chunk_bytes)");
  std::vector<std::span<std::byte>> parts;
  std::size_t offset = 0;
  for (std::size_t i = 0; i < cut_.size(); ++i) {
    const std::size_t part = cut_[i] ? layout.chunks()[i].used_bytes / size : 0;
    parts.emplace_back(memory_.data() + offset, part);
    offset += part;
  }
  parts_ = std::make_unique<WeightParts>(ranks.reads, std::move(parts));
  std::vector<StoredChunk> chunks(cut_.size());
  for (std::size_t i = 0; i < cut_.size(); ++i) {
    if (cut_[i]) {
      chunks[i].emplace_back(*parts_, i, "parameters of chunk " + std::to_string(i),
                             layout.chunks()[i].used_bytes);
    }
  }
  stream_ = std::make_unique<ChunkStream>(std::move(chunks), executor,
                                          std::span(window_.data(), window_.bytes()),
                                          kSlotAlignment, kSlots);
}

}  // namespace castor
