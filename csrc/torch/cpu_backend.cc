#include "torch/cpu_backend.h"

#include "parallel/immediate_copy_engine.h"
#include "store/cpu_backend.h"
#include "torch/chunk_storages.h"
#include "torch/counting_allocator.h"
#include "torch/torch_device.h"

namespace castor {

std::unique_ptr<CopyEngine> make_cpu_copy_engine() {
  return std::make_unique<ImmediateCopyEngine>(
      [](const CopyRequest& request) { copy_on_cpu(request.source, request.target.data()); });
}

std::shared_ptr<DeviceBackend> make_cpu_backend(std::uint64_t link_bytes_per_second) {
  return make_cpu_backend(link_bytes_per_second, {.device = device_id(c10::kCPU),
                                                  .make_copy_engine = make_cpu_copy_engine,
                                                  .count_allocations = install_counting_allocator,
                                                  .stop_counting = stop_charging_for});
}

}  // namespace castor
