#pragma once

#include <memory>

#include "core/nonmodel_memory.h"

namespace castor {

/// Returns the account that this thread's allocations on the CPU are charged to; nullptr: there is
/// none. The account counts tensors of the CPU as device memory, for the CPU device; the counting
/// allocator of csrc/torch charges them.
[[nodiscard]] const std::shared_ptr<NonModelMemory>& charged_account() noexcept;
void charge_allocations_to(const std::shared_ptr<NonModelMemory>& account) noexcept;
/// Charges this thread's allocations to no account from now on if the account's models are gone: a
/// model died between its forward and the end of its step. Returns charged_account().
[[nodiscard]] const std::shared_ptr<NonModelMemory>& living_account() noexcept;

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

}  // namespace castor
