#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/copy_engine.h"
#include "store/device_backend.h"

namespace castor {

/// Functions of torch that the CPU device uses. Thread-safe.
struct CpuDeviceFunctions {
  DeviceId device;  ///< number of the CPU
  /// Makes the copy engine of a device without a link.
  std::function<std::unique_ptr<CopyEngine>()> make_copy_engine;
  /// Has allocations of CPU tensors charged to the account of the thread that makes them.
  std::function<void()> count_allocations;
  /// Gives back what was charged for the live allocation that begins at the address.
  void (*stop_counting)(void* data) noexcept = nullptr;
};

/// Makes the backend of the CPU device: host memory, in which torch's operators compute on the
/// thread that calls them. `link_bytes_per_second`: bandwidth of an emulated link to the device,
/// each way; 0: that of the memory itself.
[[nodiscard]] std::shared_ptr<DeviceBackend> make_cpu_backend(std::uint64_t link_bytes_per_second,
                                                              CpuDeviceFunctions functions);

}  // namespace castor
