#include "store/charged_account.h"

namespace castor {
namespace {

std::shared_ptr<NonModelMemory>& account_of_this_thread() noexcept {
  thread_local std::shared_ptr<NonModelMemory> account;
  return account;
}

}  // namespace

const std::shared_ptr<NonModelMemory>& charged_account() noexcept {
  return account_of_this_thread();
}

void charge_allocations_to(const std::shared_ptr<NonModelMemory>& account) noexcept {
  if (account_of_this_thread() != account) {
    account_of_this_thread() = account;
  }
}

const std::shared_ptr<NonModelMemory>& living_account() noexcept {
  auto& account = account_of_this_thread();
  if (account && account->orphaned()) {
    account.reset();
  }
  return account;
}

}  // namespace castor
