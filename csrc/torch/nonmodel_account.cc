#include "torch/nonmodel_account.h"

#include <utility>

#include "torch/torch_error.h"

namespace castor {
namespace {

class NonModelAccount final : public DeviceAccount {
 public:
  NonModelAccount(std::shared_ptr<NonModelMemory> memory, std::shared_ptr<DeviceBackend> backend)
      : memory_(std::move(memory)), backend_(std::move(backend)) {}

  void make_room(std::size_t bytes) override {
    for_torch([&] {
      if (!memory_->fits(bytes)) {
        refuse_in_capture();
        memory_->make_room(bytes);
      }
    });
  }
  [[nodiscard]] bool evict_refused(std::size_t bytes) override {
    return for_torch([&] {
      refuse_in_capture();
      return memory_->evict_refused(bytes);
    });
  }
  void allocated(std::size_t bytes) noexcept override { memory_->note_allocated(bytes); }
  void freed(std::size_t bytes) noexcept override { memory_->note_freed(bytes); }

 private:
  /// An eviction waits for copies, which would spoil the capture.
  void refuse_in_capture() const { static_cast<void>(backend_->current_stream()); }

  const std::shared_ptr<NonModelMemory> memory_;
  const std::shared_ptr<DeviceBackend> backend_;
};

}  // namespace

std::shared_ptr<DeviceAccount> account_of(std::shared_ptr<NonModelMemory> memory,
                                          std::shared_ptr<DeviceBackend> backend) {
  return std::make_shared<NonModelAccount>(std::move(memory), std::move(backend));
}

}  // namespace castor
