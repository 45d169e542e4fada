#include "torch/counting_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>

#include "torch/torch_error.h"

namespace castor {
namespace {

std::shared_ptr<NonModelMemory>& account_of_this_thread() noexcept {
  thread_local std::shared_ptr<NonModelMemory> account;
  return account;
}

/// Owns one charged allocation: the wrapped allocator's memory and the account that paid.
struct ChargedMemory {
  c10::DataPtr memory;
  std::shared_ptr<NonModelMemory> account;
  std::size_t bytes;

  static void release(void* context) {
    auto* self = static_cast<ChargedMemory*>(context);
    self->memory.clear();
    self->account->free(self->bytes);
    delete self;
  }
};

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) : base_(base) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    const auto& account = account_of_this_thread();
    if (!account || bytes == 0) {
      return base_->allocate(bytes);
    }
    for_torch([&] { account->allocate(bytes); });
    try {
      auto charged =
          std::make_unique<ChargedMemory>(ChargedMemory{base_->allocate(bytes), account, bytes});
      void* data = charged->memory.get();
      return {data, charged.release(), &ChargedMemory::release, c10::Device(c10::kCPU)};
    } catch (...) {
      account->free(bytes);
      throw;
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // contexts differ from data

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    base_->copy_data(target, source, bytes);
  }

 private:
  c10::Allocator* base_;
};

}  // namespace

void install_counting_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: tensors hold its memory until the process ends.
    static auto* allocator = std::make_unique<CountingAllocator>(c10::GetCPUAllocator()).release();
    c10::SetCPUAllocator(allocator, /*priority=*/255);
  });
}

const std::shared_ptr<NonModelMemory>& charged_account() noexcept {
  return account_of_this_thread();
}

void charge_allocations_to(const std::shared_ptr<NonModelMemory>& account) noexcept {
  if (account_of_this_thread() != account) {
    account_of_this_thread() = account;
  }
}

}  // namespace castor
