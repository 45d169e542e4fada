#include "core/budget.h"

#include <cassert>

#include "core/error.h"
#include "core/ledger.h"
#include "core/units.h"

namespace castor {

Budget::Budget(TierKind tier, std::size_t bytes) : tier_(tier), bytes_(bytes) {
  if (bytes == 0) {
    throw InvalidArgument("the " + std::string(to_string(tier)) +
                          " budget is 0 bytes; give it at least one chunk");
  }
}

bool Budget::try_take(std::size_t bytes) noexcept {
  std::size_t used = used_.load(std::memory_order_relaxed);
  do {
    if (bytes > bytes_ - std::min(bytes_, used)) {
      return false;
    }
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  peaks_.note(used + bytes);
  return true;
}

void Budget::take_anyway(std::size_t bytes) noexcept {
  peaks_.note(used_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
}

void Budget::give_back(std::size_t bytes) noexcept {
  [[maybe_unused]] const std::size_t before = used_.fetch_sub(bytes, std::memory_order_relaxed);
  assert(before >= bytes && "more bytes given back than taken");
}

void Budget::add(const Ledger* ledger) {
  const MutexLock lock(mutex_);
  ledgers_.push_back(ledger);
}

void Budget::remove(const Ledger* ledger) noexcept {
  const MutexLock lock(mutex_);
  std::erase(ledgers_, ledger);
}

std::string Budget::shares() const {
  const MutexLock lock(mutex_);
  std::size_t models = 0;
  std::string text;
  for (const Ledger* const ledger : ledgers_) {
    if (ledger->has_left()) {
      continue;
    }
    models += ledger->owner().empty() ? 0 : 1;
    text += (text.empty() ? "" : ", ") +
            (ledger->owner().empty() ? std::string("tensors of torch") : ledger->owner()) +
            " has " + format_bytes(ledger->used());
  }
  return models < 2 ? std::string() : "Models of one plugin share this budget: " + text;
}

}  // namespace castor
