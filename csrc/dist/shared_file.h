#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/collectives.h"
#include "host/shared_homes.h"
#include "io/unique_fd.h"

namespace castor {

/// How the ranks of a group lie over machines that have memory for them to share.
struct Nodes {
  std::size_t size = 1;  ///< of each: so many ranks in a row
  std::string refusal;   ///< why that is 1; on every rank the same
};

/// Every rank calls it. Ranks of a machine are those that see each other's processes there, and
/// give the same `mark`. A machine has a row of ranks, each as many; else all count as apart.
[[nodiscard]] Nodes find_nodes(Collectives& group, const std::string& mark);

/// A file in memory that all ranks of a machine have open, or why there is none.
struct SharedFile {
  UniqueFd file;               ///< empty: there is none
  std::vector<int> processes;  ///< of the machine's ranks, in their order
  std::string refusal;         ///< on every rank the same
};

/// Every rank calls it with the same `bytes`, of which the file begins with zeros, and the size of
/// its nodes (find_nodes): all machines have a file, or none. It has no name, and goes with the
/// last process that has it, however that ends.
[[nodiscard]] SharedFile share_file(Collectives& group, std::size_t node, std::size_t bytes);

/// Homes that all ranks of a machine map, or why there are none.
struct HomesOfRanks {
  std::unique_ptr<SharedHomes> homes;  ///< nullptr: there are none
  std::string refusal;                 ///< on every rank the same
};

/// As share_file.
[[nodiscard]] HomesOfRanks share_homes(Collectives& group, std::size_t node, std::size_t bytes);

/// What the ranks say that something is refused for, "" where nothing is: the first of them.
[[nodiscard]] std::string any_refusal(Collectives& group, const std::string& own);

}  // namespace castor
