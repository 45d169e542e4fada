#include "store/nonmodel_account.h"

#include <utility>

namespace castor {
namespace {

class NonModelAccount final : public DeviceAccount {
 public:
  NonModelAccount(std::shared_ptr<NonModelMemory> memory, std::shared_ptr<DeviceBackend> backend,
                  ForAllocator for_allocator)
      : memory_(std::move(memory)),
        backend_(std::move(backend)),
        for_allocator_(std::move(for_allocator)) {}

  void make_room(std::size_t bytes) override {
    for_allocator_([&] {
      if (!memory_->fits(bytes)) {
        refuse_in_capture();
        memory_->make_room(bytes);
      }
    });
  }
  [[nodiscard]] bool evict_refused(std::size_t bytes) override {
    bool freed = false;
    for_allocator_([&] {
      refuse_in_capture();
      freed = memory_->evict_refused(bytes);
    });
    return freed;
  }
  void allocated(std::size_t bytes) noexcept override { memory_->note_allocated(bytes); }
  void freed(std::size_t bytes) noexcept override { memory_->note_freed(bytes); }

 private:
  /// An eviction waits for copies, which would spoil the capture.
  void refuse_in_capture() const { static_cast<void>(backend_->current_stream()); }

  const std::shared_ptr<NonModelMemory> memory_;
  const std::shared_ptr<DeviceBackend> backend_;
  const ForAllocator for_allocator_;
};

}  // namespace

std::shared_ptr<DeviceAccount> account_of(std::shared_ptr<NonModelMemory> memory,
                                          std::shared_ptr<DeviceBackend> backend,
                                          ForAllocator for_allocator) {
  return std::make_shared<NonModelAccount>(std::move(memory), std::move(backend),
                                           std::move(for_allocator));
}

}  // namespace castor
