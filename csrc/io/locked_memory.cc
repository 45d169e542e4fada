#include "io/locked_memory.h"

#include <sys/resource.h>

#include <cstddef>

#include "core/units.h"

namespace castor {

std::optional<std::uint64_t> locked_memory_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return static_cast<std::uint64_t>(limit.rlim_cur);
}

std::string locked_memory_remedy(std::optional<std::uint64_t> limit) {
  if (!limit) {
    return "locked memory has no limit here (RLIMIT_MEMLOCK), so the machine or its container is "
           "out of memory";
  }
  return "processes of this user may lock " + format_bytes(static_cast<std::size_t>(*limit)) +
         " in all (RLIMIT_MEMLOCK): raise it with `ulimit -l unlimited`, memlock in "
         "/etc/security/limits.conf, LimitMEMLOCK=infinity of a service, or docker run --ulimit "
         "memlock=-1";
}

}  // namespace castor
