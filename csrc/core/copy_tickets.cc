#include "core/copy_tickets.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {

// A ticket is 2 * number + direction: 0 stays "nothing".
CopyTicket CopyTickets::give(std::size_t direction) noexcept {
  return CopyTicket{2 * ++directions_[direction].num_given + direction};
}

CopyNumber CopyTickets::find(CopyTicket ticket) const {
  const auto value = static_cast<std::uint64_t>(ticket);
  const CopyNumber copy{.direction = value % 2, .number = value / 2};
  const std::uint64_t last = directions_[copy.direction].num_given;
  if (copy.number > last || value == 1) {
    throw InvalidArgument("copy ticket " + std::to_string(value) + " was never given out; copy " +
                          std::to_string(last) + " is the last of its direction");
  }
  return copy;
}

void CopyTickets::fail(CopyNumber copy, std::exception_ptr failure) {
  directions_[copy.direction].failures.emplace(copy.number, std::move(failure));
}

void CopyTickets::rethrow(CopyNumber copy) const {
  const auto& failures = directions_[copy.direction].failures;
  if (const auto failure = failures.find(copy.number); failure != failures.end()) {
    std::rethrow_exception(failure->second);
  }
}

bool CopyTickets::all_done() const noexcept {
  return std::all_of(directions_.begin(), directions_.end(), [](const Direction& direction) {
    return direction.num_done == direction.num_given;
  });
}

}  // namespace castor
