#pragma once

#include <memory>
#include <optional>

#include "core/memory_tier.h"

namespace castor {

struct HostArenaOptions {
  /// The NUMA node, by the operating system's number, that the memory is placed on; nullopt leaves
  /// the placement to the kernel (the node of the thread that touches a page first).
  std::optional<unsigned> numa_node;
};

/// The arena of the host tier: jemalloc where castor was built with it, else mmap; description()
/// says which, and why. Throws InvalidArgument when there is no such node, Error when castor was
/// built without hwloc and a node is asked for.
[[nodiscard]] std::unique_ptr<Arena> make_host_arena(const HostArenaOptions& options = {});

}  // namespace castor
