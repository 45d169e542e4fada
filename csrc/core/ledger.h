#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "core/peaks.h"
#include "core/tier_kind.h"

namespace castor {

class Ledger;

/// Bytes taken from a Ledger's budget; gives them back when destroyed. Move-only.
/// Memory is reserved before anything is evicted or allocated for it, so a budget is never passed,
/// not even for a moment.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation() { release(); }

  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  void release() noexcept;

 private:
  friend class Ledger;
  Reservation(Ledger& ledger, std::size_t bytes) noexcept : ledger_(&ledger), bytes_(bytes) {}

  Ledger* ledger_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The byte count of one tier against its hard budget. Owned by the runtime; outlives every
/// Reservation. Thread-safe and lock-free: the memory hooks of torch call it on every allocation.
/// Invariant: used() <= budget() at every moment, but for what take_anyway adds.
class Ledger {
 public:
  /// Throws InvalidArgument if `budget` is 0.
  Ledger(TierKind tier, std::size_t budget);
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  ~Ledger();

  /// nullopt when `bytes` do not fit now. Zero bytes always fit.
  [[nodiscard]] std::optional<Reservation> try_reserve(std::size_t bytes) noexcept;
  /// As try_reserve, but throws OutOfMemory with `remedy` in its message.
  [[nodiscard]] Reservation reserve(std::size_t bytes, const std::string& remedy);

  /// Untracked forms for memory whose owner cannot hold a Reservation (a torch DataPtr context).
  [[nodiscard]] bool try_take(std::size_t bytes) noexcept;
  void give_back(std::size_t bytes) noexcept;
  /// For memory that is taken already, whatever the budget says.
  void take_anyway(std::size_t bytes) noexcept;
  /// For bytes that are paid for twice for a moment: no peak sees them.
  void take_unnoted(std::size_t bytes) noexcept {
    used_.fetch_add(bytes, std::memory_order_relaxed);
  }

  [[nodiscard]] TierKind tier() const noexcept { return tier_; }
  [[nodiscard]] std::size_t budget() const noexcept { return budget_; }
  [[nodiscard]] std::size_t used() const noexcept { return used_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::size_t available() const noexcept {
    return budget_ - std::min(budget_, used());
  }
  [[nodiscard]] std::size_t peak() const noexcept { return peaks_.highest(); }
  /// The highest value since the previous call; starts the next window at the current value.
  [[nodiscard]] std::size_t take_window_peak() noexcept { return peaks_.take_window(used()); }

 private:
  const TierKind tier_;
  const std::size_t budget_;
  // Relaxed throughout: the counter carries no other data; each update is one atomic operation.
  std::atomic<std::size_t> used_{0};
  Peaks peaks_;
};

}  // namespace castor
