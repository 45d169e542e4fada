#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/executor.h"
#include "core/memory_tier.h"
#include "core/nonmodel_memory.h"
#include "core/placement.h"
#include "core/shard_map.h"
#include "io/nvme_tier.h"
#include "store/rank_host_storage.h"
#include "store/session_device.h"
#include "store/session_options.h"
#include "store/sharded_host_storage.h"
#include "store/shared_budgets.h"
#include "store/storage_plan.h"

namespace castor {

/// Memory and threads of one session: its device, the budgets that it takes from, its tiers, its
/// storage plan, and the host storage that its ranks have together. Owned by the session, and
/// outlives everything else in it. Its functions may be called from any thread.
class SessionMemory {
 public:
  /// Plans the storage, and takes what does not depend on payloads: shared and sharded host storage
  /// and NVMe. Payloads are allocated by whoever has them. Throws OutOfMemory, UsageError as
  /// ShardedHostStorage does, and what NvmeTier throws.
  SessionMemory(ChunkLayout layout, std::span<const Placement> placements,
                const SessionOptions& options);
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;
  /// Leaves the budgets: what tensors keep of the memory is theirs, and other models have its room.
  ~SessionMemory();

  [[nodiscard]] const ChunkLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::size_t num_chunks() const noexcept { return layout_.chunks().size(); }
  [[nodiscard]] const ShardMap& shards() const noexcept { return shards_; }
  [[nodiscard]] const SessionDevice& device() const noexcept { return device_; }
  [[nodiscard]] const std::shared_ptr<SharedBudgets>& budgets() const noexcept { return budgets_; }
  [[nodiscard]] const std::shared_ptr<MemoryTier>& device_tier() const noexcept {
    return device_tier_;
  }
  [[nodiscard]] const std::shared_ptr<MemoryTier>& host_tier() const noexcept { return host_tier_; }
  /// Returns the account of the device bytes that are not chunks.
  [[nodiscard]] const std::shared_ptr<NonModelMemory>& nonmodel() const noexcept {
    return nonmodel_;
  }
  /// Returns the device bytes of this model's chunks, activations and temporaries. On a GPU the
  /// activations and temporaries are those of all models.
  [[nodiscard]] std::size_t device_bytes() const noexcept;
  [[nodiscard]] Executor& executor() const noexcept { return *executor_; }
  [[nodiscard]] const RankHostStorage& rank_host_storage() const noexcept {
    return rank_host_storage_;
  }
  [[nodiscard]] const ShardedHostStorage& sharded_host_storage() const noexcept {
    return sharded_host_storage_;
  }
  [[nodiscard]] const StoragePlan& plan() const noexcept { return plan_; }
  /// Returns the NVMe tier, with contents as StoragePlan numbers them; nullptr where all is in
  /// memory.
  [[nodiscard]] const NvmeTier* nvme() const noexcept { return nvme_.get(); }
  /// Returns the stream of a content of the storage plan; nullptr where none of it is on NVMe.
  [[nodiscard]] ChunkStream* stream_of(std::size_t content) const noexcept {
    return nvme_ ? nvme_->stream(content) : nullptr;
  }
  /// Returns the number of pages that activations may take on NVMe.
  [[nodiscard]] std::size_t num_activation_pages() const noexcept {
    return plan_.nvme[StoragePlan::kActivations].chunks.size();
  }
  /// Returns, per chunk, whether its gradients have no permanent storage in memory.
  [[nodiscard]] std::vector<bool> absent_gradients() const;
  /// Returns the stage of ZeRO by which `ranks` processes keep the weights; 0 for one process.
  [[nodiscard]] std::size_t zero_stage(std::size_t ranks) const noexcept;

 private:
  [[nodiscard]] HostStoragePayer payer() const noexcept;
  [[nodiscard]] std::size_t room_for_payloads() const noexcept;

  const ChunkLayout layout_;
  const ShardMap shards_;
  const SessionDevice device_;
  const std::shared_ptr<SharedBudgets> budgets_;
  const SharedBudgets::Place budget_place_;
  const std::shared_ptr<MemoryTier> device_tier_;
  const std::shared_ptr<MemoryTier> host_tier_;
  const std::shared_ptr<Ledger> nvme_ledger_;  // nullptr: there is no such tier
  Reservation nvme_taken_;
  const std::shared_ptr<NonModelMemory> nonmodel_;
  const RankHostStorage rank_host_storage_;
  const std::unique_ptr<Executor> executor_;
  const ShardedHostStorage sharded_host_storage_;
  const StoragePlan plan_;
  const std::unique_ptr<NvmeTier> nvme_;  // nullptr: nothing is there
};

}  // namespace castor
