#pragma once

#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/copy_engine.h"
#include "core/memory_tier.h"
#include "core/mutex.h"
#include "core/nonmodel_memory.h"
#include "store/device_backend.h"

namespace castor {

/// Gradients on their way from the device to their payloads while backward goes on.
///
/// The gradients live in a window of device memory that is reserved for good. So the bytes that
/// backward takes from the budget do not depend on how fast the link is. A gradient that goes on
/// its way leaves the account of non-model memory at once, and the window pays for it until it has
/// arrived. When the window is full, the oldest gradients are waited for.
///
/// A copy that fails leaves its gradient incomplete: every submit() and wait() from then on
/// rethrows the failure. Owned by the session. Thread-safe: whoever reads a gradient may be the one
/// who waits. Destruction waits for all copies.
class GradientCopies {
 public:
  /// Reserves a window that the largest gradient fits in. Throws OutOfMemory. All arguments outlive
  /// this.
  GradientCopies(const ChunkLayout& layout, CopyEngine& engine, MemoryTier& device,
                 DeviceBackend& backend, NonModelMemory& account);
  ~GradientCopies();
  GradientCopies(const GradientCopies&) = delete;
  GradientCopies& operator=(const GradientCopies&) = delete;

  /// Sends `gradient` to `target`, and keeps `memory`, which owns all of it, until the copy is
  /// over. The device's stream has been given what writes `gradient`, and nobody else will write
  /// it. Returns false, and does nothing, if `gradient` is empty or larger than the window.
  [[nodiscard]] bool submit(ChunkId chunk, std::span<std::byte> gradient,
                            std::shared_ptr<void> memory, std::span<std::byte> target);
  /// Returns the ticket of the chunk's latest gradient that is on its way; kNone if there is none.
  [[nodiscard]] CopyTicket last_of(ChunkId chunk) const;
  /// Returns when the chunk's gradients have arrived; rethrows a copy's failure.
  void wait(ChunkId chunk);
  /// Same as wait(), but leaves the gradients' device memory to the next submit() or wait().
  void wait_beside(ChunkId chunk);

 private:
  struct Copy {
    ChunkId chunk;
    CopyTicket ticket;
    std::shared_ptr<void> memory;  // of the gradient
    std::size_t bytes = 0;         // bytes of the window that the gradient takes
    bool handed_over = false;  // by the account, which takes the bytes back when the copy is over
  };

  /// Waits for the oldest copy and moves it to `arrived`. The caller drops its memory without the
  /// mutex, since dropping a tensor that Python knows takes Python's global lock.
  void complete_first(std::vector<Copy>& arrived) CASTOR_REQUIRES(mutex_);
  void rethrow_failure() const CASTOR_REQUIRES(mutex_);

  CopyEngine& engine_;
  const MemoryTier& device_;
  DeviceBackend& backend_;
  NonModelMemory& account_;
  Reservation window_;
  mutable Mutex mutex_;                                   // held while a copy is waited for
  std::size_t used_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;  // bytes of the window in use
  std::deque<Copy> copies_ CASTOR_GUARDED_BY(mutex_);     // in the order of submission
  std::exception_ptr failure_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
