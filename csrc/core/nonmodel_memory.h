#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "core/memory_tier.h"
#include "core/mutex.h"
#include "core/peaks.h"

namespace castor {

/// Frees device memory when an allocation does not fit. Implemented by the runtime.
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  /// Evicts until `bytes` are available on the device. Throws OutOfMemory, with what would help,
  /// when that cannot be.
  virtual void reclaim(std::size_t bytes) = 0;
  /// The device refused `bytes` that its ledger has: evicts that many, as far as chunks may leave.
  /// Whether any memory came free.
  [[nodiscard]] virtual bool evict_refused(std::size_t /*bytes*/) { return false; }
};

/// Device bytes that are not chunks: activations, temporaries, gradients on their way. Shares the
/// device ledger with the chunks, so that both together never pass the budget. Shared ownership:
/// a tensor may outlive the model it came from. Thread-safe; allocate is lock-free while memory
/// lasts.
///
/// Where castor's own allocator hands the memory out, allocate and free keep the account. Where
/// another one does (a GPU's), make_room goes before it, and note_allocated and note_freed tell
/// what it did: they never block, and may be called with its locks held.
class NonModelMemory {
 public:
  explicit NonModelMemory(std::shared_ptr<MemoryTier> device) : device_(std::move(device)) {}
  ~NonModelMemory() { free(bytes()); }
  NonModelMemory(const NonModelMemory&) = delete;
  NonModelMemory& operator=(const NonModelMemory&) = delete;

  /// Takes `bytes` from the device budget, reclaiming chunks if need be. Throws OutOfMemory.
  void allocate(std::size_t bytes);
  /// As allocate where there is room as it is; else false, and nothing was taken. Never blocks.
  [[nodiscard]] bool try_allocate(std::size_t bytes) noexcept;
  void free(std::size_t bytes) noexcept;

  /// Whether `bytes` more fit the budget as it is.
  [[nodiscard]] bool fits(std::size_t bytes) const noexcept {
    return device_->ledger().available() >= bytes;
  }
  /// Reclaims chunks until `bytes` fit the budget. Throws OutOfMemory as allocate does; no effect
  /// once the model is gone.
  void make_room(std::size_t bytes);
  /// As Reclaimer::evict_refused.
  [[nodiscard]] bool evict_refused(std::size_t bytes);
  void note_allocated(std::size_t bytes) noexcept;
  void note_freed(std::size_t bytes) noexcept { free(bytes); }
  /// Somebody else pays for memory that is not freed yet; then it is about to be freed, and the
  /// account has it again until it hears of that.
  void hand_over(std::size_t bytes) noexcept { free(bytes); }
  void take_back(std::size_t bytes) noexcept {
    device_->ledger().take_unnoted(bytes);
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }

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
  void note_taken(std::size_t bytes) noexcept;

  std::shared_ptr<MemoryTier> device_;
  // Relaxed: a plain counter; each update is one atomic operation.
  std::atomic<std::size_t> bytes_{0};
  Peaks peaks_;
  std::atomic<bool> orphaned_{false};
  Mutex reclaim_mutex_;  // taken before the runtime's
  Reclaimer* reclaimer_ CASTOR_GUARDED_BY(reclaim_mutex_) = nullptr;
};

}  // namespace castor
