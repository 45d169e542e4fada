#pragma once

#include <cstdint>
#include <memory>

#include "store/device_backend.h"

namespace castor {

/// Makes the backend of the CPU device: host memory, in which torch's operators compute on the
/// thread that calls them. `link_bytes_per_second`: bandwidth of an emulated link to the device,
/// each way; 0: that of the memory itself.
[[nodiscard]] std::shared_ptr<DeviceBackend> make_cpu_backend(std::uint64_t link_bytes_per_second);

}  // namespace castor
