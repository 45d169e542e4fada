#include "store/session_chunks.h"

#include <cstddef>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {
namespace {

std::unique_ptr<UpdateQueue> make_queue(std::size_t num_chunks, const SessionOptions& options) {
  return options.overlap == Overlap::kNone
             ? nullptr
             : std::make_unique<UpdateQueue>(
                   num_chunks, options.ranks ? UpdateOrder::kSubmitted : UpdateOrder::kWanted);
}

/// Bytes of dropped copies of sharded gradients that a session keeps for the next ones. Where the
/// device computes by itself their pages are locked, which takes longer than a copy is needed.
std::size_t kept_copies(const SessionMemory& memory) {
  return memory.device().computes_by_itself() ? memory.sharded_host_storage().room_for_copies() : 0;
}

}  // namespace

SessionChunks::SessionChunks(const SessionMemory& memory, std::vector<Placement> placements,
                             const SessionOptions& options, Followers followers)
    : memory_(memory),
      followers_(std::move(followers)),
      queue_(make_queue(memory.num_chunks(), options)),
      copies_(options.backend->make_copy_engine()),
      gradient_shards_(memory.sharded_host_storage().shards() == nullptr
                           ? nullptr
                           : std::make_unique<GradientShards>(
                                 memory.layout(), *memory.sharded_host_storage().shards(),
                                 memory.host_tier(), kept_copies(memory), followers_.gradients)),
      weights_(make_weights(memory, followers_)),
      manager_(std::make_unique<ChunkManager>(
          memory.layout(), std::move(placements), memory.device_tier(), memory.host_tier(),
          *copies_, followers_.binder, weights_.get(), memory.rank_host_storage().weights().tier,
          memory.rank_host_storage().copies())) {
  if (options.ranks && memory.stream_of(StoragePlan::kWeights) != nullptr) {
    throw UsageError(
        "host_memory has no room for the parameters, and parameters on NVMe are not "
        "trained by several ranks yet: raise host_memory, or train with one process");
  }
  manager_->follow(queue_.get());
}

std::unique_ptr<StoredWeights> SessionChunks::make_weights(const SessionMemory& memory,
                                                           const Followers& followers) {
  const ShardedHostStorage& sharded = memory.sharded_host_storage();
  if (ChunkStream* const stream = sharded.stream()) {
    return std::make_unique<StoredWeights>(
        StoredWeights::on_ranks(sharded.sharded(), ShardedHostStorage::kMaxLeases),
        followers.params, followers.gradients, *stream, memory.device());
  }
  ChunkStream* const stream = memory.stream_of(StoragePlan::kWeights);
  return stream == nullptr
             ? nullptr
             : std::make_unique<StoredWeights>(
                   StoredWeights::on_nvme(memory.plan().stored.weights, stream->num_slots()),
                   followers.params, followers.gradients, *stream, memory.device());
}

void SessionChunks::end() {
  std::vector<std::shared_ptr<Payload>> host_payloads;
  for (std::size_t i = 0; i < memory_.num_chunks(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    host_payloads.push_back(manager_->payload(chunk, PayloadKind::kParam));
    for (std::size_t kind = 0; kind < kNumPayloadKinds; ++kind) {
      if (const auto& payload = manager_->payload(chunk, static_cast<PayloadKind>(kind))) {
        payload->share_with_children();
      }
    }
  }
  memory_.device().leave(host_payloads);  // before payloads go that a promotion has read
  manager_.reset();                       // slots have gone to the host
  weights_.reset();
  memory_.device().leave(host_payloads);  // after the last copies
  followers_.released(host_payloads);
  if (const auto& copies = memory_.rank_host_storage().copies()) {
    copies->end();
  }
}

GateGroups::Guard SessionChunks::guard_of(ChunkId chunk, PayloadKind kind) const {
  if (kind == PayloadKind::kParam ? stored(chunk) : absent_gradients(chunk)) {
    return GateGroups::Guard::kBrought;
  }
  return memory_.device().computes_by_itself() ? GateGroups::Guard::kHeld
                                               : GateGroups::Guard::kNone;
}

}  // namespace castor
