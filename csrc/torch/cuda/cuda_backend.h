#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "store/device_backend.h"

namespace castor {

/// Makes the backend of a GPU: streams, page-locked host storage, kernels, torch's caching
/// allocator. `device` is one that torch has initialised. Throws InvalidArgument if torch has no
/// such device.
[[nodiscard]] std::shared_ptr<DeviceBackend> make_cuda_backend(c10::DeviceIndex device);

}  // namespace castor
