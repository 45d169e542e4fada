#include "store/sharded_host_storage.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "core/error.h"
#include "store/rank_host_storage.h"

namespace castor {
namespace {

constexpr std::size_t kSlotAlignment = 64;

/// Throws UsageError, on every rank, unless ranks keep as many copies of the weights as were asked
/// for.
void check_copies(const SessionOptions& options, const RankHostStorage& common) {
  const std::size_t asked = options.extra_dp_size;
  const bool shared = common.weights().storage != nullptr;
  if (asked == 1 || !options.ranks || (shared && asked == common.nodes())) {
    return;
  }
  if (!shared && options.ranks->reads != nullptr && options.zero_stage == 3) {
    return;
  }
  const std::string ranks = std::to_string(options.ranks->passes->size());
  const std::string extra = "extra_dp_size=" + std::to_string(asked);
  if (shared) {
    const std::string nodes = std::to_string(common.nodes());
    throw UsageError(extra + " asks for as many copies of the weights, and these " + ranks +
                     " ranks keep " + nodes +
                     ": one on each machine, whose ranks share its "
                     "memory; give extra_dp_size=1" +
                     (common.nodes() > 1 ? " or " + nodes +
                                               ", or zero_stage=3, which shards weights over ranks "
                                               "of all machines"
                                         : ""));
  }
  throw UsageError(extra + " says how many copies of the weights " + ranks +
                   " ranks keep in shards, and with this zero_stage each of them has full weights "
                   "here (" +
                   options.ranks->link + (common.refusal().empty() ? "" : "; " + common.refusal()) +
                   "); give zero_stage=3, or extra_dp_size=1");
}

}  // namespace

void ShardedHostStorage::check_equal_on_all(const RankGroups& ranks,
                                            const std::vector<bool>& on_host) const {
  const std::vector<std::size_t> all =
      gather(*ranks.passes, std::hash<std::vector<bool>>()(on_host));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      throw UsageError("rank 0 and rank " + std::to_string(rank) +
                       " place chunks differently, and zero_stage=" + std::to_string(stage_) +
                       " cuts the same ones on all: give every rank the same device_memory and "
                       "placement_policy, or zero_stage=1");
    }
  }
}

ShardedHostStorage::ShardedHostStorage(const ChunkLayout& layout,
                                       std::span<const Placement> placements,
                                       const RankGroups& ranks, std::size_t stage,
                                       std::size_t copies, MemoryTier& host, Executor& executor)
    : stage_(stage) {
  const std::size_t size = ranks.passes->size();
  std::vector<std::size_t> weights;  // of each chunk the parts that this rank keeps
  std::vector<std::size_t> gradients;
  std::vector<bool> on_host;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const ChunkSpec& chunk = layout.chunks()[i];
    on_host.push_back(placements[i] != Placement::kDevice && chunk.used_bytes > 0);
    sharded_.push_back(on_host[i] && stage_ == 3);
    weights.push_back(sharded_[i] ? chunk.used_bytes / size * copies : 0);
    gradients.push_back(on_host[i] && chunk.trainable ? chunk.used_bytes / size : 0);
    shard_bytes_ += weights[i];
    bytes += weights[i] + gradients[i];
    room_for_copies_ = std::max(room_for_copies_, kGradientCopies * gradients[i] * size);
  }
  check_equal_on_all(ranks, on_host);
  if (bytes == 0) {
    throw UsageError("zero_stage=" + std::to_string(stage_) + " shards " +
                     (stage_ == 3 ? "weights" : "gradients") +
                     " that have host storage, and all of this model's are on the "
                     "device: give placement_policy=\"auto\" or \"cpu\", or zero_stage=1");
  }
  memory_ = host.allocate(bytes,
                          "this rank's shard of the weights and gradients has no room there; "
                          "raise host_memory, or train on more ranks");
  std::vector<std::span<std::byte>> shards;
  std::size_t offset = 0;
  for (const auto* const kind : {&weights, &gradients}) {
    for (const std::size_t shard : *kind) {
      shards.emplace_back(memory_.data() + offset, shard);
      offset += shard;
    }
  }
  shards_ = std::make_unique<WeightShards>(ranks.reads, std::move(shards), sharded_.size(), copies);
  if (shard_bytes_ > 0) {
    make_window(layout, host, executor);
  }
}

void ShardedHostStorage::make_window(const ChunkLayout& layout, MemoryTier& host,
                                     Executor& executor) {
  std::vector<StoredChunk> chunks(sharded_.size());
  std::size_t largest = 0;
  for (std::size_t i = 0; i < sharded_.size(); ++i) {
    if (sharded_[i]) {
      const std::size_t bytes = layout.chunks()[i].used_bytes;
      chunks[i].emplace_back(*shards_, i, "parameters of chunk " + std::to_string(i), bytes);
      largest = std::max(largest, bytes);
    }
  }
  window_ = host.allocate(ChunkStream::memory_bytes(largest, kSlots, kSlotAlignment),
                          "a window gathers weights that are sharded over ranks "
                          "there; raise host_memory, or make chunks smaller (chunk_bytes)");
  stream_ = std::make_unique<ChunkStream>(std::move(chunks), executor,
                                          std::span(window_.data(), window_.bytes()),
                                          kSlotAlignment, kSlots);
}

ShardedHostStorage make_sharded_host_storage(const ChunkLayout& layout,
                                             std::span<const Placement> placements,
                                             const SessionOptions& options,
                                             const RankHostStorage& common, MemoryTier& host,
                                             Executor& executor) {
  check_copies(options, common);
  if (!options.ranks || common.weights().storage) {
    return {};
  }
  const bool trains = std::any_of(layout.chunks().begin(), layout.chunks().end(),
                                  [](const ChunkSpec& chunk) { return chunk.trainable; });
  if (options.zero_stage == 2 && !trains) {
    return {};  // there are no gradients to shard
  }
  if (options.ranks->reads == nullptr) {
    if (options.zero_stage > 1) {
      throw UsageError("zero_stage=" + std::to_string(options.zero_stage) +
                       " goes with ranks that share host storage here, and these do not (" +
                       options.ranks->link + "; " + common.refusal() + "); give zero_stage=1");
    }
    return {};
  }
  return ShardedHostStorage(layout, placements, *options.ranks, options.zero_stage,
                            options.extra_dp_size, host, executor);
}

}  // namespace castor
