#include "core/ledger.h"

#include <cassert>
#include <utility>

namespace castor {

Reservation::Reservation(Reservation&& other) noexcept
    : ledger_(std::exchange(other.ledger_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    release();
    ledger_ = std::exchange(other.ledger_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void Reservation::release() noexcept {
  if (ledger_ != nullptr) {
    std::exchange(ledger_, nullptr)->give_back(std::exchange(bytes_, 0));
  }
}

Ledger::Ledger(TierKind tier, std::size_t budget)
    : Ledger(std::make_shared<Budget>(tier, budget), {}) {}

Ledger::Ledger(std::shared_ptr<Budget> budget, std::string owner)
    : budget_(std::move(budget)),
      owner_(std::move(owner)),
      window_(budget_->peaks_, budget_->used()) {
  budget_->add(this);
}

Ledger::~Ledger() {
  assert(used() == 0 && "a reservation outlived its ledger");
  budget_->remove(this);
}

// False: it has left.
bool Ledger::add(std::size_t bytes) noexcept {
  std::size_t used = raw();
  do {
    if ((used & kLeft) != 0) {
      return false;
    }
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return true;
}

bool Ledger::try_take(std::size_t bytes) noexcept {
  if (has_left()) {
    return true;
  }
  if (!budget_->try_take(bytes)) {
    return false;
  }
  if (!add(bytes)) {
    budget_->give_back(bytes);
  }
  return true;
}

void Ledger::give_back(std::size_t bytes) noexcept {
  std::size_t used = raw();
  do {
    if ((used & kLeft) != 0) {
      return;
    }
    assert(used >= bytes && "more bytes given back than taken");
  } while (!used_.compare_exchange_weak(used, used - bytes, std::memory_order_relaxed));
  budget_->give_back(bytes);
}

void Ledger::take_anyway(std::size_t bytes) noexcept {
  if (has_left()) {
    return;
  }
  budget_->take_anyway(bytes);
  if (!add(bytes)) {
    budget_->give_back(bytes);
  }
}

void Ledger::take_unnoted(std::size_t bytes) noexcept {
  if (has_left()) {
    return;
  }
  budget_->take_unnoted(bytes);
  if (!add(bytes)) {
    budget_->give_back(bytes);
  }
}

void Ledger::leave() noexcept {
  const std::size_t used = used_.exchange(kLeft, std::memory_order_relaxed);
  if ((used & kLeft) == 0) {
    budget_->give_back(used);
  }
}

std::optional<Reservation> Ledger::try_reserve(std::size_t bytes) noexcept {
  if (!try_take(bytes)) {
    return std::nullopt;
  }
  return Reservation(*this, bytes);
}

Reservation Ledger::reserve(std::size_t bytes, const std::string& remedy) {
  if (auto reservation = try_reserve(bytes)) {
    return std::move(*reservation);
  }
  throw out_of_memory(bytes, remedy);
}

OutOfMemory Ledger::out_of_memory(std::size_t bytes, const std::string& remedy) const {
  std::string text = budget_->shares();
  text = text.empty() || remedy.empty() ? remedy + text : remedy + ". " + text;
  return {tier(), bytes, available(), budget(), text};
}

}  // namespace castor
