#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/collectives.h"
#include "host/shared_host_storage.h"
#include "io/unique_fd.h"

namespace castor {

/// Distribution of the ranks of a group over machines that have memory for them to share.
struct Nodes {
  std::size_t size = 1;  ///< ranks of each machine, which are consecutive
  std::string refusal;   ///< reason why the size is 1, the same on every rank
};

/// Finds the machines of the ranks; every rank calls it. Ranks of one machine are those that see
/// each other's processes there, and give the same `mark`. Each machine has consecutive ranks, and
/// as many as the others; else every rank counts as a machine of its own.
[[nodiscard]] Nodes find_nodes(Collectives& group, const std::string& mark);

/// A file in memory that all ranks of a machine have open, or the reason why there is none.
struct SharedFile {
  UniqueFd file;               ///< empty: there is none
  std::vector<int> processes;  ///< processes of the machine's ranks, in rank order
  std::string refusal;         ///< on every rank the same
};

/// Makes a file for each machine, or for none. Every rank calls it, with the same `bytes` and the
/// size of its nodes (find_nodes). The file begins with `bytes` zeros. It has no name, and goes
/// with the last process that has it, however that ends.
[[nodiscard]] SharedFile share_file(Collectives& group, std::size_t node, std::size_t bytes);

/// Host storage that all ranks of a machine map, or the reason why there is none.
struct NodeHostStorage {
  std::unique_ptr<SharedHostStorage> storage;  ///< nullptr: there is none
  std::string refusal;                         ///< on every rank the same
};

/// Makes host storage that the ranks of each machine share, in a file of share_file().
/// `lock_pages`: locks it for a device; empty where nothing does.
[[nodiscard]] NodeHostStorage share_host_storage(
    Collectives& group, std::size_t node, std::size_t bytes,
    const SharedHostStorage::LockPages& lock_pages = {});

/// Returns the reason of the first rank that refuses something, "" where none does. `own` is this
/// rank's reason.
[[nodiscard]] std::string any_refusal(Collectives& group, const std::string& own);

}  // namespace castor
