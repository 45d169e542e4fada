#pragma once

#include <cstdint>
#include <memory>

#include "torch/device_backend.h"

namespace castor {

/// The backend of the CPU device: memory of the host, in which torch's operators compute on the
/// thread that calls them. `link_bytes_per_second`: bandwidth of an emulated link to it, each way;
/// 0: memory's own.
[[nodiscard]] std::shared_ptr<DeviceBackend> make_cpu_backend(std::uint64_t link_bytes_per_second);

}  // namespace castor
