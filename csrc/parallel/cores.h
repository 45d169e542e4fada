#pragma once

#include <cstddef>

namespace castor {

/// Returns the number of cores that the calling thread may run on (its affinity mask), at least 1.
/// Under taskset, numactl or a container's cpuset it is smaller than the machine's. CPU quotas are
/// not looked at.
[[nodiscard]] std::size_t num_available_cores();

}  // namespace castor
