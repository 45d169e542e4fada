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

/// Seam that frees device memory when an allocation does not fit. Implemented by the runtime, for
/// all models that share the account.
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  /// Evicts until `bytes` are available on the device. Throws OutOfMemory, with what would help,
  /// when that cannot be.
  virtual void reclaim(std::size_t bytes) = 0;
  /// Evicts `bytes` of chunks, as far as they may leave, after the device refused bytes that its
  /// ledger has. Returns whether any memory came free.
  [[nodiscard]] virtual bool evict_refused(std::size_t /*bytes*/) { return false; }
};

/// Account of the device bytes that are not chunks: activations, temporaries, gradients on their
/// way to the host. Takes from the device budget as the chunks do, so that both together never pass
/// the budget. Shared ownership: a tensor may outlive the model it came from. Thread-safe; allocate
/// is lock-free while memory lasts.
///
/// The account belongs to one model. Where torch's allocations on a device cannot be told apart by
/// model, it belongs to all models that share the budget, and their runtimes stand in for one
/// another.
///
/// If castor's own allocator hands the memory out, allocate and free keep the account. If another
/// allocator does (a GPU's), make_room is called before it, and note_allocated and note_freed tell
/// what it did. The latter two never block, and may be called with that allocator's locks held.
class NonModelMemory {
 public:
  explicit NonModelMemory(std::shared_ptr<Ledger> device) : device_(std::move(device)) {}
  /// Makes an account on the ledger of a tier, which the account keeps alive.
  explicit NonModelMemory(const std::shared_ptr<MemoryTier>& device)
      : NonModelMemory(std::shared_ptr<Ledger>(device, &device->ledger())) {}
  ~NonModelMemory() { free(bytes()); }
  NonModelMemory(const NonModelMemory&) = delete;
  NonModelMemory& operator=(const NonModelMemory&) = delete;

  /// Takes `bytes` from the device budget, reclaiming chunks if need be. Throws OutOfMemory.
  void allocate(std::size_t bytes);
  /// Same as allocate, but returns false, and takes nothing, where there is no room without
  /// reclaiming. Never blocks.
  [[nodiscard]] bool try_allocate(std::size_t bytes) noexcept;
  void free(std::size_t bytes) noexcept;

  /// Returns whether `bytes` more fit the budget as it is.
  [[nodiscard]] bool fits(std::size_t bytes) const noexcept {
    return device_->available() >= bytes;
  }
  /// Reclaims chunks until `bytes` fit the budget. Throws OutOfMemory as allocate does. No effect
  /// once the model is gone.
  void make_room(std::size_t bytes);
  /// Evicts chunks through one of the account's runtimes (Reclaimer::evict_refused).
  [[nodiscard]] bool evict_refused(std::size_t bytes);
  void note_allocated(std::size_t bytes) noexcept;
  void note_freed(std::size_t bytes) noexcept { free(bytes); }
  /// Takes bytes that are not freed yet off the account, because another one pays for them
  /// (hand_over). Puts them back when they are about to be freed, until the account hears of that
  /// (take_back).
  void hand_over(std::size_t bytes) noexcept { free(bytes); }
  void take_back(std::size_t bytes) noexcept {
    device_->take_unnoted(bytes);
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }

  /// Registers a runtime. Blocks while a reclaim is running.
  void add_reclaimer(Reclaimer* reclaimer);
  /// Removes a runtime, before it is destroyed. Blocks while a reclaim is running.
  void remove_reclaimer(Reclaimer* reclaimer);
  /// Returns whether no model is left: a caller that still charges allocations to this account
  /// should stop.
  [[nodiscard]] bool orphaned() const noexcept { return orphaned_.load(std::memory_order_relaxed); }

  [[nodiscard]] std::size_t bytes() const noexcept {
    return bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::size_t peak_bytes() const noexcept { return peaks_.highest(); }
  /// Returns the peaks of bytes(), for windows of the caller's own.
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
