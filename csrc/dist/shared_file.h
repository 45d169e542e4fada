#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/collectives.h"
#include "host/shared_homes.h"
#include "io/unique_fd.h"

namespace castor {

/// A file in memory that all ranks of a group have open, or why there is none.
struct SharedFile {
  UniqueFd file;               ///< empty: there is none
  std::vector<int> processes;  ///< of the ranks, in their order
  std::string refusal;         ///< on every rank the same
};

/// Every rank calls it with the same `bytes`, of which the file begins with zeros. It has no name,
/// and goes with the last process that has it, however that ends.
[[nodiscard]] SharedFile share_file(Collectives& group, std::size_t bytes);

/// Homes that all ranks of a group map, or why there are none.
struct HomesOfRanks {
  std::unique_ptr<SharedHomes> homes;  ///< nullptr: there are none
  std::string refusal;                 ///< on every rank the same
};

/// As share_file.
[[nodiscard]] HomesOfRanks share_homes(Collectives& group, std::size_t bytes);

/// What the ranks say that something is refused for, "" where nothing is: the first of them.
[[nodiscard]] std::string any_refusal(Collectives& group, const std::string& own);

}  // namespace castor
