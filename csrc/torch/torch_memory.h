#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "store/device_memory.h"

namespace castor {

/// Device memory that is a storage of torch's.
class TorchMemory final : public DeviceMemory {
 public:
  explicit TorchMemory(c10::Storage storage) : storage_(std::move(storage)) {}

  [[nodiscard]] std::byte* data() const noexcept override {
    return static_cast<std::byte*>(storage_.mutable_data());
  }
  [[nodiscard]] std::size_t bytes() const noexcept override { return storage_.nbytes(); }
  [[nodiscard]] const c10::Storage& storage() const noexcept { return storage_; }

 private:
  const c10::Storage storage_;
};

/// Returns a function that takes memory of `device` from torch's allocator.
[[nodiscard]] inline TakeDeviceMemory take_from(c10::Device device) {
  return [device](std::size_t bytes) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    return std::make_shared<TorchMemory>(
        at::empty({static_cast<std::int64_t>(bytes)}, options).storage());
  };
}

/// Returns the storage of memory that is a TorchMemory.
[[nodiscard]] inline const c10::Storage& storage_of(const DeviceMemory& memory) noexcept {
  return static_cast<const TorchMemory&>(memory).storage();
}

}  // namespace castor
