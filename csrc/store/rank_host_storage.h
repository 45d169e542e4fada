#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "core/chunk_layout.h"
#include "core/ledger.h"
#include "core/memory_tier.h"
#include "core/placement.h"
#include "host/shared_host_storage.h"
#include "store/session_options.h"

namespace castor {

/// Host storage of a session's parameters and gradients that its ranks share: one copy for all
/// ranks of a machine, of which each rank pays its share. Owned by the session.
///
/// There is no shared storage in these cases:
/// - The ranks share no memory.
/// - The device computes by itself, and its ranks run on several machines, or the system refuses to
///   lock the pages for it.
/// - Another optimizer than castor's updates the chunk. It updates full parameters on every rank,
///   which would leave each rank with a copy.
/// - The host storage is sharded over the ranks of several machines (ShardedHostStorage).
class RankHostStorage {
 public:
  /// Shared host storage of one kind of payload; empty where there is none.
  struct Kind {
    std::unique_ptr<SharedHostStorage> storage;
    Reservation share;                 ///< this rank's share, reserved from the host
    std::shared_ptr<MemoryTier> tier;  ///< hands out blocks of `storage`
  };

  /// Sets up the shared storage; every rank makes one such object. `host` pays for this rank's
  /// share. Throws OutOfMemory.
  RankHostStorage(const ChunkLayout& layout, std::span<const Placement> placements,
                  const SessionOptions& options, const std::shared_ptr<MemoryTier>& host);

  [[nodiscard]] const Kind& weights() const noexcept { return weights_; }
  /// Returns the shared storage of gradients. Beside it, each rank has copies of gradients that
  /// have not been reduced (RankGradients).
  [[nodiscard]] const Kind& gradients() const noexcept { return gradients_; }
  /// Returns the memory of this rank's own copies of what is in the storage; nullptr where the
  /// system makes them, or there is no storage.
  [[nodiscard]] const std::shared_ptr<HostBlocks>& copies() const noexcept { return copies_; }
  /// Returns the host bytes for gradients on their way: a window, and a few chunks that other ranks
  /// have not completed. Whoever fills the host leaves these bytes free.
  [[nodiscard]] std::size_t room_for_copies() const noexcept { return room_for_copies_; }
  /// Returns the bytes of all ranks of this machine together.
  [[nodiscard]] std::size_t bytes() const noexcept;
  /// Returns the number of machines, each of which has its own shared storage, where there is any.
  [[nodiscard]] std::size_t nodes() const noexcept { return nodes_; }
  /// Returns why ranks that share memory have no shared storage; empty where they have it, or share
  /// no memory.
  [[nodiscard]] const std::string& refusal() const noexcept { return refusal_; }

 private:
  Kind weights_;
  Kind gradients_;
  std::shared_ptr<HostBlocks> copies_;
  std::size_t room_for_copies_ = 0;
  std::size_t nodes_ = 1;
  std::string refusal_;
};

}  // namespace castor
