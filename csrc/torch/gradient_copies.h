#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <deque>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/copy_engine.h"
#include "core/memory_tier.h"
#include "core/mutex.h"
#include "core/nonmodel_memory.h"
#include "torch/device_backend.h"

namespace castor {

/// Gradients on their way from the device to their payloads while backward goes on.
///
/// They live in a window of device memory that is reserved for good, so that what backward takes
/// from the budget does not depend on how fast the link is: a gradient that goes on its way leaves
/// the account of non-model memory at once and is paid for by the window until it has arrived. When
/// the window is full, the oldest ones are waited for.
///
/// A copy that fails leaves a gradient that is not there: every call from then on rethrows it.
/// Owned by the session. Thread-safe: whoever reads a gradient may be the one who waits.
/// Destruction waits for all.
class GradientCopies {
 public:
  /// The largest gradient fits the window. Throws OutOfMemory. All outlive this.
  GradientCopies(const ChunkLayout& layout, CopyEngine& engine, MemoryTier& device,
                 DeviceBackend& backend, NonModelMemory& account);
  ~GradientCopies();
  GradientCopies(const GradientCopies&) = delete;
  GradientCopies& operator=(const GradientCopies&) = delete;

  /// Sends `gradient`, which the device's stream has been given to write and nobody else will, to
  /// `target`, and holds its memory until it is there. False, and nothing happened, if it is a part
  /// of other memory or laid out otherwise than `like`.
  [[nodiscard]] bool submit(ChunkId chunk, const at::Tensor& gradient, const at::Tensor& like,
                            std::span<std::byte> target);
  /// The ticket of the chunk's latest gradient that is on its way; kNone if there is none.
  [[nodiscard]] CopyTicket last_of(ChunkId chunk) const;
  /// Returns when the chunk's gradients have arrived; rethrows a copy's failure.
  void wait(ChunkId chunk);

 private:
  struct Copy {
    ChunkId chunk;
    CopyTicket ticket;
    at::Tensor gradient;
    std::size_t bytes = 0;     // of the window
    bool handed_over = false;  // by the account, which has them back when the copy is over
  };

  /// The copy goes to `arrived`, for its gradient to be dropped without the mutex: one that Python
  /// knows takes Python's global lock.
  void complete_first(std::vector<Copy>& arrived) CASTOR_REQUIRES(mutex_);
  void rethrow_failure() const CASTOR_REQUIRES(mutex_);

  CopyEngine& engine_;
  const MemoryTier& device_;
  DeviceBackend& backend_;
  NonModelMemory& account_;
  Reservation window_;
  mutable Mutex mutex_;                                   // held while a copy is waited for
  std::size_t used_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;  // of the window
  std::deque<Copy> copies_ CASTOR_GUARDED_BY(mutex_);     // in the order of submission
  std::exception_ptr failure_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
