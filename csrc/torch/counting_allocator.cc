#include "torch/counting_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>

#include "store/charged_account.h"
#include "store/charged_allocations.h"
#include "torch/gil.h"
#include "torch/torch_error.h"

namespace castor {
namespace {

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) : base_(base) {}

  /// The one in place; nullptr before install_counting_allocator.
  static CountingAllocator*& installed() noexcept {
    static CountingAllocator* allocator = nullptr;
    return allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const auto& account = living_account();
    if (!account || bytes == 0) {
      return base_->allocate(bytes);
    }
    if (!account->try_allocate(bytes)) {
      for_torch([&] {
        const GilRelease released;  // torch.tensor() allocates with it
        account->allocate(bytes);
      });
    }
    void* data = nullptr;
    try {
      data = base_->raw_allocate(bytes);
      charged_.add(data, {account, bytes});
    } catch (...) {
      if (data != nullptr) {
        base_->raw_deallocate(data);
      }
      account->free(bytes);
      throw;
    }
    return {data, data, &CountingAllocator::release, c10::Device(c10::kCPU)};
  }

  /// Frees what allocate or raw_allocate gave, charged or not, also from before the installation.
  c10::DeleterFnPtr raw_deleter() const override { return &CountingAllocator::release; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    base_->copy_data(target, source, bytes);
  }

  /// Gives back what the account paid for the live allocation `data`.
  void forgive(void* data) noexcept { charged_.take(data).give_back(); }

 private:
  static void release(void* data) {
    CountingAllocator& self = *installed();
    // Before the memory goes: its address may be given out again at once.
    const ChargedAllocations::Charge charge = self.charged_.take(data);
    self.base_->raw_deallocate(data);
    charge.give_back();
  }

  c10::Allocator* base_;
  ChargedAllocations charged_;
};

}  // namespace

void install_counting_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: tensors hold its memory until the process ends.
    CountingAllocator::installed() =
        std::make_unique<CountingAllocator>(c10::GetCPUAllocator()).release();
    c10::SetCPUAllocator(CountingAllocator::installed(), /*priority=*/255);
  });
}

void stop_charging_for(void* data) noexcept { CountingAllocator::installed()->forgive(data); }

}  // namespace castor
