#include "torch/cpu_backend.h"

#include "host/host_arena.h"
#include "host/slot_arena.h"
#include "parallel/async_copy_engine.h"
#include "parallel/immediate_copy_engine.h"
#include "torch/chunk_storages.h"
#include "torch/counting_allocator.h"
#include "torch/torch_device.h"

namespace castor {
namespace {

class CpuBackend final : public DeviceBackend {
 public:
  explicit CpuBackend(std::uint64_t link_bytes_per_second)
      : link_bytes_per_second_(link_bytes_per_second) {}

  [[nodiscard]] DeviceId device() const noexcept override { return device_id(c10::kCPU); }
  [[nodiscard]] DeviceKernels* kernels() noexcept override { return nullptr; }

  // At memory speed a copy is over soonest when all cores take part; a link leaves them free.
  [[nodiscard]] std::unique_ptr<CopyEngine> make_copy_engine() override {
    if (link_bytes_per_second_ == 0) {
      return make_cpu_copy_engine();
    }
    return std::make_unique<AsyncCopyEngine>(
        AsyncCopyOptions{.bytes_per_second = link_bytes_per_second_, .copy = {}});
  }
  [[nodiscard]] std::unique_ptr<Arena> make_device_arena() override {
    return std::make_unique<SlotArena>(castor::make_host_arena());
  }
  [[nodiscard]] std::unique_ptr<Arena> make_host_arena() override {
    return castor::make_host_arena();
  }

  void follow(const std::shared_ptr<DeviceAccount>& /*account: threads name theirs*/) override {
    install_counting_allocator();
  }
  [[nodiscard]] bool stop_counting(void* data) noexcept override {
    stop_charging_for(data);
    return true;
  }

 private:
  const std::uint64_t link_bytes_per_second_;
};

}  // namespace

std::unique_ptr<CopyEngine> make_cpu_copy_engine() {
  return std::make_unique<ImmediateCopyEngine>(
      [](const CopyRequest& request) { copy_on_cpu(request.source, request.target.data()); });
}

std::shared_ptr<DeviceBackend> make_cpu_backend(std::uint64_t link_bytes_per_second) {
  return std::make_shared<CpuBackend>(link_bytes_per_second);
}

}  // namespace castor
