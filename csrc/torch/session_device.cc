#include "torch/session_device.h"

#include <utility>

#include "torch/torch_error.h"

namespace castor {
namespace {

/// What a device's allocator does for torch, as the model's non-model memory.
class NonModelAccount final : public DeviceAccount {
 public:
  explicit NonModelAccount(std::shared_ptr<NonModelMemory> memory) : memory_(std::move(memory)) {}

  void make_room(std::size_t bytes) override {
    for_torch([&] { memory_->make_room(bytes); });
  }
  [[nodiscard]] bool evict_refused(std::size_t bytes) override {
    return for_torch([&] { return memory_->evict_refused(bytes); });
  }
  void allocated(std::size_t bytes) noexcept override { memory_->note_allocated(bytes); }
  void freed(std::size_t bytes) noexcept override { memory_->note_freed(bytes); }

 private:
  const std::shared_ptr<NonModelMemory> memory_;
};

}  // namespace

c10::Device SessionDevice::torch_device() const {
  return backend_ ? backend_->device() : c10::Device(c10::kCPU);
}

void SessionDevice::follow(const std::shared_ptr<NonModelMemory>& memory) {
  if (backend_) {
    account_ = std::make_shared<NonModelAccount>(memory);
    backend_->follow(account_);
  }
}

void SessionDevice::await() const {
  if (backend_) {
    backend_->fence()->wait();
  }
}

std::shared_ptr<ComputeFence> SessionDevice::fence() const {
  return backend_ ? backend_->fence() : nullptr;
}

void SessionDevice::host_writes(std::span<const std::byte> home) const {
  if (backend_) {
    backend_->host_writes(home);
  }
}

void SessionDevice::leave(std::span<const std::shared_ptr<Payload>> homes) const noexcept {
  try {
    await();
    for (const auto& home : homes) {
      host_writes({home->data(), home->bytes()});
    }
  } catch (...) {  // the device is lost, and its copies with it
  }
}

}  // namespace castor
