#pragma once

#include <cstdint>
#include <memory>

#include "core/copy_engine.h"
#include "store/device_backend.h"

namespace castor {

/// Makes the backend of the CPU device: host memory, in which torch's operators compute on the
/// thread that calls them. `link_bytes_per_second`: bandwidth of an emulated link to the device,
/// each way; 0: that of the memory itself.
[[nodiscard]] std::shared_ptr<DeviceBackend> make_cpu_backend(std::uint64_t link_bytes_per_second);

/// Makes the copy engine of the CPU device at memory speed. It copies on the calling thread and on
/// torch's intra-op threads, because those spin for a while after each operator: threads of anybody
/// else would wait for the cores that these hold. torch.set_num_threads() bounds a copy as it
/// bounds an operator. No autograd graph, dispatch mode or profiler sees a copy.
[[nodiscard]] std::unique_ptr<CopyEngine> make_cpu_copy_engine();

}  // namespace castor
