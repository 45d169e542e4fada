#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "core/chunk_layout.h"
#include "core/ledger.h"
#include "core/memory_tier.h"
#include "core/placement.h"
#include "host/shared_homes.h"
#include "torch/session_options.h"

namespace castor {

/// The homes of parameters and gradients of a session whose ranks share memory: one copy for all of
/// a machine, of which each rank pays its share. None where ranks share no memory; on devices that
/// compute by themselves, which copy from page-locked homes; of chunks that another optimizer than
/// castor's updates, all of them on every rank, which would leave each with a copy; where homes are
/// cut over the ranks of several machines (CutHomes). Owned by the session.
class RankHomes {
 public:
  /// All of one kind; empty where there are none.
  struct Kind {
    std::unique_ptr<SharedHomes> homes;
    Reservation share;                 ///< of the host's
    std::shared_ptr<MemoryTier> tier;  ///< hands them out
  };

  /// Every rank makes one. `host` pays, and outlives this. Throws OutOfMemory.
  RankHomes(const ChunkLayout& layout, std::span<const Placement> placements,
            const SessionOptions& options, MemoryTier& host);

  [[nodiscard]] const Kind& weights() const noexcept { return weights_; }
  /// Each rank has copies, too, of those that have not been reduced (RankGradients).
  [[nodiscard]] const Kind& gradients() const noexcept { return gradients_; }
  /// Of the host, for gradients on their way: a window, and a few chunks that other ranks have not
  /// completed. Whoever fills the host leaves it.
  [[nodiscard]] std::size_t room_for_copies() const noexcept { return room_for_copies_; }
  /// Of all ranks of this machine together.
  [[nodiscard]] std::size_t bytes() const noexcept;
  /// Machines that have such homes each, where there are any.
  [[nodiscard]] std::size_t nodes() const noexcept { return nodes_; }
  /// Why ranks that share memory have none; "": they have, or share no memory.
  [[nodiscard]] const std::string& refusal() const noexcept { return refusal_; }

 private:
  Kind weights_;
  Kind gradients_;
  std::size_t room_for_copies_ = 0;
  std::size_t nodes_ = 1;
  std::string refusal_;
};

}  // namespace castor
