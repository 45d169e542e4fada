#pragma once

#include <c10/core/Device.h>

#include "store/device_backend.h"

namespace castor {

[[nodiscard]] inline c10::Device to_torch(DeviceId device) noexcept {
  return {static_cast<c10::DeviceType>(device.type), device.number};
}

[[nodiscard]] inline DeviceId device_id(c10::Device device) noexcept {
  return {.type = static_cast<std::int8_t>(device.type()), .number = device.index()};
}

}  // namespace castor
