#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/collectives.h"
#include "ranks/rank_waits.h"

namespace castor {

/// Collectives of the ranks of each machine, which share its memory, or the reason why they cannot.
struct SharedCollectives {
  std::shared_ptr<Collectives> ranks;  ///< nullptr: the ranks cannot share memory
  std::string refusal;                 ///< reason, the same on every rank
};

/// Makes collectives over shared memory for the ranks of each machine. Every rank of all machines
/// calls it, with the size of their nodes (find_nodes). `group` is used for the setup only. Data
/// that a rank sends to the others of its machine is copied once into memory that all have mapped,
/// and read there: nothing goes through sockets. The memory has no name and goes with the last
/// process that has it, however that ends.
///
/// A call that waits for others throws Error, which names the rank:
///
/// - where a process has ended or let go of its collectives;
/// - within a quarter of a minute where a process is stopped;
/// - after `patience`'s timeout.
///
/// Later calls then throw the same at once.
[[nodiscard]] SharedCollectives share_memory(Collectives& group, std::size_t node,
                                             RankPatience patience = {});

}  // namespace castor
