#pragma once

#include <cstddef>

#include "store/device_backend.h"

namespace castor {

/// Returns how many bytes of host memory the system locks for the device beside those that are
/// locked now: `wanted`, rounded up to whole pages, or less by trying. The result is at most a
/// sixteenth below what it would lock. Takes as long as locking `wanted` a few times.
[[nodiscard]] std::size_t lockable_bytes(DeviceBackend& backend, std::size_t wanted);

}  // namespace castor
