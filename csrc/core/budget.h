#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "core/mutex.h"
#include "core/peaks.h"
#include "core/tier_kind.h"

namespace castor {

class Ledger;

/// Hard budget of one tier, from which one ledger takes, or the ledgers of several models. Shared
/// by its ledgers. Thread-safe; taking and giving back are lock-free.
/// Invariant: used() <= bytes() at all times, except for what Ledger::take_anyway and
/// Ledger::take_unnoted add. used() is the sum of the bytes that its ledgers have taken, without
/// those of ledgers that have left.
class Budget {
 public:
  /// Throws InvalidArgument if `bytes` is 0.
  Budget(TierKind tier, std::size_t bytes);
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  [[nodiscard]] TierKind tier() const noexcept { return tier_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t used() const noexcept { return used_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::size_t available() const noexcept { return bytes_ - std::min(bytes_, used()); }
  [[nodiscard]] std::size_t peak() const noexcept { return peaks_.highest(); }
  /// Returns a text for messages: the models that share the budget and the bytes that each has of
  /// it. Empty where one model is alone.
  [[nodiscard]] std::string shares() const;

 private:
  friend class Ledger;
  [[nodiscard]] bool try_take(std::size_t bytes) noexcept;
  void take_anyway(std::size_t bytes) noexcept;
  void take_unnoted(std::size_t bytes) noexcept {
    used_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void give_back(std::size_t bytes) noexcept;
  void add(const Ledger* ledger);
  void remove(const Ledger* ledger) noexcept;

  const TierKind tier_;
  const std::size_t bytes_;
  // Relaxed throughout: the counter carries no other data; each update is one atomic operation.
  std::atomic<std::size_t> used_{0};
  Peaks peaks_;
  mutable Mutex mutex_;
  std::vector<const Ledger*> ledgers_ CASTOR_GUARDED_BY(mutex_);  // in the order they came
};

}  // namespace castor
