#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace castor {

/// Device memory of torch's, on the account of the model's activations. Whoever shares it keeps it.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  [[nodiscard]] virtual std::byte* data() const noexcept = 0;
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;
};

/// Function that takes such memory. Throws OutOfMemory; may evict chunks, and have spare memory
/// give way (SpareMemory).
using TakeDeviceMemory = std::function<std::shared_ptr<DeviceMemory>(std::size_t bytes)>;

}  // namespace castor
