#include "core/ledger.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "core/error.h"

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

Ledger::Ledger(TierKind tier, std::size_t budget) : tier_(tier), budget_(budget) {
  if (budget == 0) {
    throw InvalidArgument("the " + std::string(to_string(tier)) +
                          " budget is 0 bytes; give it at least one chunk");
  }
}

Ledger::~Ledger() { assert(used() == 0 && "a reservation outlived its ledger"); }

bool Ledger::try_take(std::size_t bytes) noexcept {
  std::size_t used = used_.load(std::memory_order_relaxed);
  do {
    if (bytes > budget_ - std::min(budget_, used)) {
      return false;
    }
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  peaks_.note(used + bytes);
  return true;
}

void Ledger::give_back(std::size_t bytes) noexcept {
  [[maybe_unused]] const std::size_t before = used_.fetch_sub(bytes, std::memory_order_relaxed);
  assert(before >= bytes && "more bytes given back than taken");
}

void Ledger::take_anyway(std::size_t bytes) noexcept {
  peaks_.note(used_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
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
  throw OutOfMemory(tier_, bytes, available(), budget_, remedy);
}

}  // namespace castor
