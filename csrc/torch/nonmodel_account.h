#pragma once

#include <memory>

#include "core/nonmodel_memory.h"
#include "store/device_backend.h"

namespace castor {

/// Returns an account that charges what the device's allocator gives torch to `memory`.
[[nodiscard]] std::shared_ptr<DeviceAccount> account_of(std::shared_ptr<NonModelMemory> memory,
                                                        std::shared_ptr<DeviceBackend> backend);

}  // namespace castor
