#pragma once

// torch's header of that name, as far as castor's sources use it: there is one simulated GPU.

#include <c10/core/Device.h>

namespace c10::cuda {

inline DeviceIndex device_count() noexcept { return 1; }
inline DeviceIndex current_device() { return 0; }

}  // namespace c10::cuda
