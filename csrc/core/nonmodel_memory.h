#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "core/memory_tier.h"
#include "core/mutex.h"
#include "core/peaks.h"

namespace castor {

/// Frees device memory when an allocation does not fit. Implemented by the runtime, for all models
/// that share the account.
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

/// Device bytes that are not chunks: activations, temporaries, gradients on their way. Takes from
/// the device budget as the chunks do, so that both together never pass it. Shared ownership: a
/// tensor may outlive the model it came from. Thread-safe; allocate is lock-free while memory
/// lasts.
///
/// Of one model; or, where what torch allocates on a device cannot be told apart, of all models
/// that share the budget, whose runtimes stand in for one another.
///
/// Where castor's own allocator hands the memory out, allocate and free keep the account. Where
/// another one does (a GPU's), make_room goes before it, and note_allocated and note_freed tell
/// what it did: they never block, and may be called with its locks held.
class NonModelMemory {
 public:
  explicit NonModelMemory(std::shared_ptr<Ledger> device) : device_(std::move(device)) {}
  /// On the ledger of a tier, which it keeps.
  explicit NonModelMemory(const std::shared_ptr<MemoryTier>& device)
      : NonModelMemory(std::shared_ptr<Ledger>(device, &device->ledger())) {}
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
    return device_->available() >= bytes;
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
    device_->take_unnoted(bytes);
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }

  /// A runtime registers itself, and takes itself off before it goes; both block while a reclaim is
  /// running.
  void add_reclaimer(Reclaimer* reclaimer);
  void remove_reclaimer(Reclaimer* reclaimer);
  /// Whether no model is left: whoever still charges allocations to this account should stop.
  [[nodiscard]] bool orphaned() const noexcept { return orphaned_.load(std::memory_order_relaxed); }

  [[nodiscard]] std::size_t bytes() const noexcept {
    return bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::size_t peak_bytes() const noexcept { return peaks_.highest(); }
  /// For windows of one's own over bytes().
  [[nodiscard]] Peaks& peaks() noexcept { return peaks_; }

 private:
  void note_taken(std::size_t bytes) noexcept;

  const std::shared_ptr<Ledger> device_;
  // Relaxed: a plain counter; each update is one atomic operation.
  std::atomic<std::size_t> bytes_{0};
  Peaks peaks_;
  std::atomic<bool> orphaned_{false};
  Mutex reclaim_mutex_;  // taken before the runtimes'
  std::vector<Reclaimer*> reclaimers_ CASTOR_GUARDED_BY(reclaim_mutex_);
};

}  // namespace castor
