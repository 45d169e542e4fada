#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "store/device_backend.h"

namespace castor {

/// Name of the capsule that carries a std::shared_ptr<DeviceBackend> to castor._C.Session. All
/// modules come from one build: the name changes with the interface.
inline constexpr const char* kDeviceBackendCapsule = "castor.DeviceBackend.8";

[[nodiscard]] inline pybind11::capsule capsule_of(std::shared_ptr<DeviceBackend> backend) {
  return {new std::shared_ptr<DeviceBackend>(std::move(backend)), kDeviceBackendCapsule,
          [](void* held) { delete static_cast<std::shared_ptr<DeviceBackend>*>(held); }};
}

}  // namespace castor
