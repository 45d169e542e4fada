#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <memory>

#include "device_memory.h"

namespace castor::simulated {

/// Of the simulated GPU of the process: 4 GiB.
[[nodiscard]] DeviceMemory& device_memory();

/// The calling thread's current stream, as torch and as the simulated GPU name it.
[[nodiscard]] c10::Stream current_stream();
[[nodiscard]] std::shared_ptr<Stream> current_queue();
/// Returns the one before.
c10::Stream exchange_stream(c10::Stream stream);
[[nodiscard]] c10::Stream torch_stream(std::uint64_t id);
[[nodiscard]] std::shared_ptr<Stream> queue_of(const c10::Stream& stream);

/// torch's record_stream: no effect on memory that is not the caching allocator's.
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);

/// Registers streams, events and host memory with torch. Once.
void add_device_to_torch();
/// The operators. Once.
void add_operators_to_torch();

/// Throws RuntimeError with the sticky error of the device, if there is one.
void check_device();

}  // namespace castor::simulated
