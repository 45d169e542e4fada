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

/// What one model, or one user, has taken from a tier's hard budget, which several may share. Owned
/// by a tier; outlives every Reservation. Thread-safe and lock-free: the memory hooks of torch call
/// it on every allocation.
/// Invariant: the budget's; used() is this ledger's part.
class Ledger {
 public:
  /// Of a budget of its own. Throws InvalidArgument if `budget` is 0.
  Ledger(TierKind tier, std::size_t budget);
  /// `owner` names the model in errors that tell who has what of a shared budget; empty: it is
  /// none.
  Ledger(std::shared_ptr<Budget> budget, std::string owner);
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
  void take_unnoted(std::size_t bytes) noexcept;

  /// The budget gets back all that is taken, which stays with those who have it and is nobody's
  /// concern from now on: nothing is counted here any more.
  void leave() noexcept;
  [[nodiscard]] bool has_left() const noexcept { return (raw() & kLeft) != 0; }

  /// For throwing: what was requested, what there is, who has the rest, and `remedy`.
  [[nodiscard]] OutOfMemory out_of_memory(std::size_t bytes, const std::string& remedy) const;

  [[nodiscard]] TierKind tier() const noexcept { return budget_->tier(); }
  [[nodiscard]] const std::string& owner() const noexcept { return owner_; }
  /// By this ledger.
  [[nodiscard]] std::size_t used() const noexcept { return has_left() ? 0 : raw(); }
  // Of the budget, whoever takes from it.
  [[nodiscard]] std::size_t budget() const noexcept { return budget_->bytes(); }
  [[nodiscard]] std::size_t available() const noexcept { return budget_->available(); }
  [[nodiscard]] std::size_t peak() const noexcept { return budget_->peak(); }
  /// The highest value since the previous call; starts the next window at the current value.
  [[nodiscard]] std::size_t take_window_peak() noexcept { return window_.take(budget_->used()); }

 private:
  static constexpr std::size_t kLeft = ~(~std::size_t{0} >> 1);
  [[nodiscard]] std::size_t raw() const noexcept { return used_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool add(std::size_t bytes) noexcept;

  const std::shared_ptr<Budget> budget_;
  const std::string owner_;
  Peaks::Window window_;
  // With kLeft from leave() on. Relaxed: each update is one atomic operation.
  std::atomic<std::size_t> used_{0};
};

}  // namespace castor
