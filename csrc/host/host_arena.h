#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "core/memory_tier.h"
#include "core/page_source.h"

namespace castor {

struct HostArenaOptions {
  /// The NUMA node, by the operating system's number, that the memory is placed on; nullopt leaves
  /// the placement to the kernel (the node of the thread that touches a page first).
  std::optional<unsigned> numa_node;
  /// Makes other pages of the (bound) pages of the system: those of a GPU's host tier are
  /// registered with CUDA. Such pages are resident from the beginning, so a block then has its own
  /// size and not that of jemalloc's next size class, up to a quarter more: the mmap arena serves
  /// it.
  std::function<std::unique_ptr<PageSource>(std::unique_ptr<PageSource>)> adapt_pages;
};

/// The arena of the host tier: jemalloc where castor was built with it and pages are not adapted,
/// else mmap; description()
/// says which, and why. Throws InvalidArgument when there is no such node, Error when castor was
/// built without hwloc and a node is asked for.
[[nodiscard]] std::unique_ptr<Arena> make_host_arena(const HostArenaOptions& options = {});

}  // namespace castor
