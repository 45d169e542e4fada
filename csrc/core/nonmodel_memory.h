#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "core/memory_tier.h"
#include "core/peaks.h"

namespace castor {

/// Frees device memory when an allocation does not fit. Implemented by the runtime.
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  /// Evicts until `bytes` are available on the device. Throws OutOfMemory, with what would help,
  /// when that cannot be.
  virtual void reclaim(std::size_t bytes) = 0;
};

/// Device bytes that are not chunks: activations, temporaries, gradients on their way. Shares the
/// device ledger with the chunks, so that both together never pass the budget. Shared ownership:
/// a tensor may outlive the model it came from. Thread-safe; allocate is lock-free while memory
/// lasts.
class NonModelMemory {
 public:
  explicit NonModelMemory(std::shared_ptr<MemoryTier> device) : device_(std::move(device)) {}

  /// Takes `bytes` from the device budget, reclaiming chunks if need be. Throws OutOfMemory.
  void allocate(std::size_t bytes);
  void free(std::size_t bytes) noexcept;

  /// The runtime registers itself, and nullptr before it goes; blocks while a reclaim is running.
  void set_reclaimer(Reclaimer* reclaimer);
  /// Whether the model is gone: whoever still charges allocations to this account should stop.
  [[nodiscard]] bool orphaned() const noexcept { return orphaned_.load(std::memory_order_relaxed); }

  [[nodiscard]] std::size_t bytes() const noexcept {
    return bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::size_t peak_bytes() const noexcept { return peaks_.highest(); }
  /// The highest value since the previous call; starts the next window at the current value.
  [[nodiscard]] std::size_t take_window_peak() noexcept { return peaks_.take_window(bytes()); }

 private:
  std::shared_ptr<MemoryTier> device_;
  // Relaxed: a plain counter; each update is one atomic operation.
  std::atomic<std::size_t> bytes_{0};
  Peaks peaks_;
  std::atomic<bool> orphaned_{false};
  std::mutex reclaim_mutex_;  // guards reclaimer_; taken before the runtime's mutex
  Reclaimer* reclaimer_ = nullptr;
};

}  // namespace castor
