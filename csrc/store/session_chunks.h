#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/chunk_manager.h"
#include "core/copy_engine.h"
#include "core/overlap.h"
#include "core/placement.h"
#include "parallel/update_queue.h"
#include "store/address_follower.h"
#include "store/gate_groups.h"
#include "store/gradient_shards.h"
#include "store/session_memory.h"
#include "store/stored_weights.h"

namespace castor {

/// Payloads of one session's chunks, and what copies them: the chunk manager, the parameters and
/// gradients that have no permanent storage in memory, and the copy engine of the device. Owned by
/// the session. The runtime's mutex guards the manager; everything else is thread-safe.
class SessionChunks {
 public:
  /// Objects that follow the addresses of payloads. All outlive the chunks.
  struct Followers {
    ParamBinder& binder;               ///< follows parameters in memory
    const AddressFollower& params;     ///< follows those on NVMe, or sharded over ranks
    const AddressFollower& gradients;  ///< follows gradients of such parameters
    /// Called at the end, when no chunk is in a slot any more, with the payloads that have the
    /// parameters, in the order of chunks.
    std::function<void(const std::vector<std::shared_ptr<Payload>>&)> released;
  };

  /// Allocates the parameters of every chunk. `memory` outlives this. Throws OutOfMemory. Throws
  /// UsageError where parameters on NVMe would be trained by several ranks.
  SessionChunks(const SessionMemory& memory, std::vector<Placement> placements,
                const SessionOptions& options, Followers followers);
  SessionChunks(const SessionChunks&) = delete;
  SessionChunks& operator=(const SessionChunks&) = delete;
  /// Moves every chunk to its host storage, and shares the payloads with forked children: tensors
  /// may keep them. Updates and passes are over. Nothing but the queue and the copy engine may be
  /// used afterwards.
  void end();

  [[nodiscard]] ChunkManager& manager() const noexcept { return *manager_; }
  [[nodiscard]] CopyEngine& copies() const noexcept { return *copies_; }
  /// Returns the queue of updates that run beside the caller; nullptr with Overlap::kNone.
  [[nodiscard]] UpdateQueue* queue() const noexcept { return queue_.get(); }
  /// Returns the parameters without permanent storage in memory; nullptr where all have some.
  [[nodiscard]] StoredWeights* weights() const noexcept { return weights_.get(); }
  /// Returns the sharded gradients; nullptr where gradients are full, or shared.
  [[nodiscard]] GradientShards* gradient_shards() const noexcept { return gradient_shards_.get(); }

  /// Returns whether the chunk's parameters have no permanent storage in memory.
  [[nodiscard]] bool stored(ChunkId chunk) const noexcept {
    return weights_ && weights_->stored(chunk);
  }
  [[nodiscard]] bool sharded_gradients(ChunkId chunk) const noexcept {
    return gradient_shards_ && gradient_shards_->sharded(chunk);
  }
  /// Returns whether the chunk's gradients have no permanent storage in memory.
  [[nodiscard]] bool absent_gradients(ChunkId chunk) const {
    return sharded_gradients(chunk) || manager_->gradients_stored(chunk);
  }
  /// Returns how operators on the chunk's parameters or gradients have to be guarded. On a device
  /// whose freed memory is given out again at once, what an operator has the address of must not
  /// leave before its kernel is given to a stream (docs/design/0021).
  [[nodiscard]] GateGroups::Guard guard_of(ChunkId chunk, PayloadKind kind) const;
  /// Returns torch's message to whoever asks for the address of such gradients, or of such
  /// parameters. Requires that there are some.
  [[nodiscard]] std::string no_address(ChunkId chunk, PayloadKind kind) const {
    return kind == PayloadKind::kGrad && sharded_gradients(chunk) ? GradientShards::no_address()
                                                                  : weights_->no_address();
  }

 private:
  [[nodiscard]] static std::unique_ptr<StoredWeights> make_weights(const SessionMemory& memory,
                                                                   const Followers& followers);

  const SessionMemory& memory_;
  const Followers followers_;
  const std::unique_ptr<UpdateQueue> queue_;  // outlives copies' waits
  const std::unique_ptr<CopyEngine> copies_;
  const std::unique_ptr<GradientShards> gradient_shards_;
  std::unique_ptr<StoredWeights> weights_;
  std::unique_ptr<ChunkManager> manager_;
};

}  // namespace castor
