#pragma once

#include <memory>

#include "core/nonmodel_memory.h"

namespace castor {

/// Accounting of CPU tensors as device memory, for the CPU device. A counting allocator wraps the
/// one that torch uses. It charges allocations of threads that work for a boosted model to that
/// model's NonModelMemory, which may evict chunks or raise. It passes all others through untouched.
/// The memory events of torch.profiler come from the wrapped allocator and stay right.

/// Puts the allocator in place, once per process. The allocator stays: tensors may hold its memory.
void install_counting_allocator();

/// Returns the account that this thread's allocations are charged to; nullptr: there is none.
[[nodiscard]] const std::shared_ptr<NonModelMemory>& charged_account() noexcept;
void charge_allocations_to(const std::shared_ptr<NonModelMemory>& account) noexcept;
/// Scope in which this thread's allocations are charged to no account.
class Uncharged {
 public:
  Uncharged() : account_(charged_account()) { charge_allocations_to(nullptr); }
  ~Uncharged() { charge_allocations_to(account_); }
  Uncharged(const Uncharged&) = delete;
  Uncharged& operator=(const Uncharged&) = delete;

 private:
  const std::shared_ptr<NonModelMemory> account_;
};

/// Gives back what was charged for the live allocation that begins at `data`, if anything was:
/// somebody else pays for it from now on. Requires install_counting_allocator().
void stop_charging_for(void* data) noexcept;

}  // namespace castor
