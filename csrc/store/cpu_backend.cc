#include "store/cpu_backend.h"

#include <utility>

#include "host/host_arena.h"
#include "host/slot_arena.h"
#include "parallel/async_copy_engine.h"

namespace castor {
namespace {

class CpuBackend final : public DeviceBackend {
 public:
  CpuBackend(std::uint64_t link_bytes_per_second, CpuDeviceFunctions functions)
      : link_bytes_per_second_(link_bytes_per_second), functions_(std::move(functions)) {}

  [[nodiscard]] DeviceId device() const noexcept override { return functions_.device; }
  [[nodiscard]] DeviceKernels* kernels() noexcept override { return nullptr; }

  // At memory speed a copy is over soonest when all cores take part; a link leaves them free.
  [[nodiscard]] std::unique_ptr<CopyEngine> make_copy_engine() override {
    if (link_bytes_per_second_ == 0) {
      return functions_.make_copy_engine();
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
    functions_.count_allocations();
  }
  [[nodiscard]] bool stop_counting(void* data) noexcept override {
    functions_.stop_counting(data);
    return true;
  }

 private:
  const std::uint64_t link_bytes_per_second_;
  const CpuDeviceFunctions functions_;
};

}  // namespace

std::shared_ptr<DeviceBackend> make_cpu_backend(std::uint64_t link_bytes_per_second,
                                                CpuDeviceFunctions functions) {
  return std::make_shared<CpuBackend>(link_bytes_per_second, std::move(functions));
}

}  // namespace castor
