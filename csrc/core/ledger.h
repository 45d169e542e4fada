#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "core/budget.h"
#include "core/error.h"
#include "core/peaks.h"
#include "core/tier_kind.h"

namespace castor {

class Ledger;

/// Bytes taken from a Ledger's budget, which are given back when the reservation is destroyed.
/// Move-only. Memory is reserved before anything is evicted or allocated for it, so a budget is
/// never passed, not even briefly.
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

/// Account of the bytes that one model, or one other user, has taken from a tier's hard budget.
/// Several ledgers may share a budget. Owned by a tier; outlives every Reservation. Thread-safe and
/// lock-free: the memory hooks of torch call it on every allocation.
/// Invariant: that of the budget; used() counts only what this ledger has taken.
class Ledger {
 public:
  /// Makes a ledger with a budget of its own. Throws InvalidArgument if `budget` is 0.
  Ledger(TierKind tier, std::size_t budget);
  /// Makes a ledger of a shared budget. `owner` names the model in errors that list the shares of
  /// the budget; empty: the ledger is not a model's.
  Ledger(std::shared_ptr<Budget> budget, std::string owner);
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  ~Ledger();

  /// Reserves `bytes`; returns nullopt when they do not fit now. Zero bytes always fit.
  [[nodiscard]] std::optional<Reservation> try_reserve(std::size_t bytes) noexcept;
  /// Same as try_reserve, but throws OutOfMemory with `remedy` in its message.
  [[nodiscard]] Reservation reserve(std::size_t bytes, const std::string& remedy);

  /// Untracked forms of reserving and releasing, for memory whose owner cannot hold a Reservation
  /// (a torch DataPtr context).
  [[nodiscard]] bool try_take(std::size_t bytes) noexcept;
  void give_back(std::size_t bytes) noexcept;
  /// Takes bytes whatever the budget says, for memory that is in use already.
  void take_anyway(std::size_t bytes) noexcept;
  /// Same as take_anyway, but for bytes that are paid for twice for a short time: no peak includes
  /// them.
  void take_unnoted(std::size_t bytes) noexcept;

  /// Gives all bytes taken back to the budget, and counts nothing any more. The memory stays with
  /// its owners and is not accounted for from now on.
  void leave() noexcept;
  [[nodiscard]] bool has_left() const noexcept { return (raw() & kLeft) != 0; }

  /// Returns an error to throw: the bytes requested, the bytes available, the users of the rest,
  /// and `remedy`.
  [[nodiscard]] OutOfMemory out_of_memory(std::size_t bytes, const std::string& remedy) const;

  [[nodiscard]] TierKind tier() const noexcept { return budget_->tier(); }
  [[nodiscard]] const std::string& owner() const noexcept { return owner_; }
  /// Returns the bytes taken by this ledger.
  [[nodiscard]] std::size_t used() const noexcept { return has_left() ? 0 : raw(); }
  // Figures of the budget, over all its ledgers.
  [[nodiscard]] std::size_t budget() const noexcept { return budget_->bytes(); }
  [[nodiscard]] std::size_t available() const noexcept { return budget_->available(); }
  [[nodiscard]] std::size_t peak() const noexcept { return budget_->peak(); }
  /// Returns the highest used() of the budget since the previous call, and starts the next window
  /// at the current value.
  [[nodiscard]] std::size_t take_window_peak() noexcept { return window_.take(budget_->used()); }

 private:
  static constexpr std::size_t kLeft = ~(~std::size_t{0} >> 1);
  [[nodiscard]] std::size_t raw() const noexcept { return used_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool add(std::size_t bytes) noexcept;

  const std::shared_ptr<Budget> budget_;
  const std::string owner_;
  Peaks::Window window_;
  // Has the bit kLeft from leave() on. Relaxed: each update is one atomic operation.
  std::atomic<std::size_t> used_{0};
};

}  // namespace castor
