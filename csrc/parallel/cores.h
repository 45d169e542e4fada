#pragma once

#include <cstddef>

namespace castor {

/// Number of cores the calling thread may run on (its affinity mask): at least 1, and fewer than
/// the machine has under taskset, numactl or a container's cpuset. CPU quotas are not looked at.
[[nodiscard]] std::size_t num_available_cores();

}  // namespace castor
