#include "store/shared_budgets.h"

#include <utility>

namespace castor {

std::size_t SharedBudgets::num_models() const {
  const MutexLock lock(mutex_);
  return numbers_.size();
}

Reservation SharedBudgets::take_communicators(std::size_t bytes) {
  return communicators_.reserve(
      bytes,
      "communicators between the ranks' devices take this memory: give more device_memory, "
      "or set CASTOR_DEVICE_LINK=host, with which tensors go through host memory");
}

std::size_t SharedBudgets::take_number() {
  const MutexLock lock(mutex_);
  std::size_t number = 1;
  while (!numbers_.insert(number).second) {
    ++number;
  }
  return number;
}

SharedBudgets::Place::Place(SharedBudgets& budgets, const std::string& model)
    : budgets_(budgets),
      number_(budgets.take_number()),
      owner_(model + " (model " + std::to_string(number_) + " of its plugin)") {}

SharedBudgets::Place::~Place() {
  const MutexLock lock(budgets_.mutex_);
  budgets_.numbers_.erase(number_);
}

void SharedBudgets::follow_torch(DeviceBackend& backend, std::shared_ptr<DeviceAccount> account) {
  const MutexLock lock(mutex_);
  if (!account_) {
    backend.follow(account);
    account_ = std::move(account);
  }
}

}  // namespace castor
