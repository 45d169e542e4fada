#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "core/memory_tier.h"
#include "core/page_source.h"

namespace castor {

struct HostArenaOptions {
  /// Operating system's number of the NUMA node that the memory is placed on. nullopt leaves the
  /// placement to the kernel, which takes the node of the thread that touches a page first.
  std::optional<unsigned> numa_node;
  /// Replaces the (bound) pages of the system by others. The host tier of a GPU registers its pages
  /// with CUDA here. Such pages are resident from the beginning, so the mmap arena serves their
  /// blocks. It gives a block its own size; jemalloc's next size class is up to a quarter larger.
  std::function<std::unique_ptr<PageSource>(std::unique_ptr<PageSource>)> adapt_pages;
};

/// Makes the arena of the host tier: jemalloc where castor was built with it and pages are not
/// adapted, else mmap. description() says which, and why. Throws InvalidArgument when there is no
/// such node, Error when castor was built without hwloc and a node is asked for.
[[nodiscard]] std::unique_ptr<Arena> make_host_arena(const HostArenaOptions& options = {});

}  // namespace castor
