#pragma once

#include <functional>
#include <memory>

#include "core/nonmodel_memory.h"
#include "store/device_backend.h"

namespace castor {

/// Function that runs `work` where torch's allocator is the caller: errors leave as that expects.
using ForAllocator = std::function<void(const std::function<void()>& work)>;

/// Returns an account that charges what the device's allocator gives torch to `memory`.
[[nodiscard]] std::shared_ptr<DeviceAccount> account_of(std::shared_ptr<NonModelMemory> memory,
                                                        std::shared_ptr<DeviceBackend> backend,
                                                        ForAllocator for_allocator);

}  // namespace castor
