#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>

#include "core/copy_engine.h"

namespace castor {

/// Direction and number of the copy that a ticket names. Numbers begin at 1; 0 names no copy.
struct CopyNumber {
  std::size_t direction = 0;
  std::uint64_t number = 0;
};

/// Tickets of an asynchronous copy engine. Copies of each direction are numbered as they are
/// submitted, and done in that order. Owned by the engine, whose mutex guards it.
class CopyTickets {
 public:
  /// Returns the ticket of the next copy of a direction.
  [[nodiscard]] CopyTicket give(std::size_t direction) noexcept;
  /// Returns the copy that a ticket names. Throws InvalidArgument for a ticket that was never given
  /// out.
  [[nodiscard]] CopyNumber find(CopyTicket ticket) const;

  /// Marks the next copy of a direction as done.
  void complete(std::size_t direction) noexcept { ++directions_[direction].num_done; }
  /// Makes every rethrow of the copy throw `failure` from now on.
  void fail(CopyNumber copy, std::exception_ptr failure);
  [[nodiscard]] bool failed(CopyNumber copy) const {
    return directions_[copy.direction].failures.contains(copy.number);
  }
  void rethrow(CopyNumber copy) const;

  [[nodiscard]] bool done(CopyNumber copy) const noexcept {
    return copy.number <= directions_[copy.direction].num_done;
  }
  [[nodiscard]] std::uint64_t num_done(std::size_t direction) const noexcept {
    return directions_[direction].num_done;
  }
  [[nodiscard]] bool all_done() const noexcept;

 private:
  struct Direction {
    std::uint64_t num_given = 0;
    std::uint64_t num_done = 0;
    std::map<std::uint64_t, std::exception_ptr> failures;  // by number
  };
  std::array<Direction, 2> directions_;
};

}  // namespace castor
