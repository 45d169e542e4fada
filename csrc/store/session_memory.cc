#include "store/session_memory.h"

#include <algorithm>
#include <utility>

#include "parallel/make_executor.h"
#include "store/session_nvme.h"

namespace castor {

SessionMemory::SessionMemory(ChunkLayout layout, std::span<const Placement> placements,
                             const SessionOptions& options)
    : layout_(std::move(layout)),
      shards_(layout_, options.ranks ? options.ranks->passes->rank() : 0),
      device_(options.backend),
      budgets_(options.budgets),
      budget_place_(*budgets_, options.name),
      device_tier_(std::make_shared<MemoryTier>(budgets_->device(), budget_place_.owner(),
                                                options.backend->make_device_arena(),
                                                device_.stream())),
      host_tier_(std::make_shared<MemoryTier>(budgets_->host(), budget_place_.owner(),
                                              options.backend->make_host_arena())),
      nvme_ledger_(nvme_ledger(options, budget_place_.owner())),
      nonmodel_(device_.computes_by_itself() ? budgets_->tensors_of_torch()
                                             : std::make_shared<NonModelMemory>(device_tier_)),
      rank_host_storage_(layout_, placements, options, host_tier_),
      executor_(make_executor(options.num_threads)),
      sharded_host_storage_(make_sharded_host_storage(layout_, placements, options,
                                                      rank_host_storage_, *host_tier_, *executor_)),
      plan_(plan_storage(layout_, placements, options.state, room_for_payloads(), payer())),
      nvme_(make_nvme(plan_, options, *host_tier_, *executor_, nvme_ledger_.get(),
                      budget_place_.number(), nvme_taken_)) {}

SessionMemory::~SessionMemory() {
  host_tier_->ledger().leave();
  if (!device_.computes_by_itself()) {
    device_tier_->ledger().leave();
  }
}

HostStoragePayer SessionMemory::payer() const noexcept {
  return rank_host_storage_.weights().storage ? HostStoragePayer::kRankHostStorage
         : sharded_host_storage_.stage() == 3 ? HostStoragePayer::kSharded
         : sharded_host_storage_.stage() == 2 ? HostStoragePayer::kShardedGradients
                                              : HostStoragePayer::kHostBudget;
}

std::size_t SessionMemory::room_for_payloads() const noexcept {
  const std::size_t available = host_tier_->ledger().available();
  return available - std::min(available, rank_host_storage_.room_for_copies() +
                                             sharded_host_storage_.room_for_copies());
}

std::size_t SessionMemory::device_bytes() const noexcept {
  const std::size_t tensors = device_.computes_by_itself() ? nonmodel_->bytes() : 0;
  return device_tier_->ledger().used() + tensors;
}

std::vector<bool> SessionMemory::absent_gradients() const {
  const WeightShards* const sharded = sharded_host_storage_.shards();
  std::vector<bool> absent(num_chunks(), false);
  for (std::size_t i = 0; i < absent.size(); ++i) {
    absent[i] =
        layout_.chunks()[i].trainable &&
        (plan_.stored.weights[i] ||
         (sharded != nullptr &&
          sharded->sharded(ChunkId{static_cast<std::uint32_t>(absent.size() + i)})));  // gradients
  }
  return absent;
}

std::size_t SessionMemory::zero_stage(std::size_t ranks) const noexcept {
  if (ranks == 1) {
    return 0;
  }
  if (!rank_host_storage_.weights().storage) {
    return std::max<std::size_t>(sharded_host_storage_.stage(), 1);
  }
  const bool once = rank_host_storage_.nodes() == 1 &&
                    std::all_of(layout_.chunks().begin(), layout_.chunks().end(),
                                [](const ChunkSpec& chunk) { return chunk.updated_in_shards(); });
  return once ? 3 : 1;
}

}  // namespace castor
