#include "torch_allocations.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace castor::testing {
namespace {

thread_local bool counted_here = true;

/// Does to torch's CPU allocator what castor._cuda does to its CUDA allocator.
class FollowedAllocator final : public c10::Allocator {
 public:
  explicit FollowedAllocator(c10::Allocator* base) : base_(base) {}

  static FollowedAllocator& installed() {
    static FollowedAllocator* const allocator = [] {
      auto* const made = new FollowedAllocator(c10::GetCPUAllocator());  // tensors hold its memory
      c10::SetCPUAllocator(made, /*priority=*/255);
      return made;
    }();
    return *allocator;
  }

  void follow(const std::shared_ptr<DeviceAccount>& account) {
    const std::lock_guard lock(mutex_);
    account_ = account;
  }

  std::size_t refuse(std::size_t n) {
    until_refusal_ = n;
    return num_refused_;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    std::shared_ptr<DeviceAccount> account;
    {
      const std::lock_guard lock(mutex_);
      account = counted_here ? account_.lock() : nullptr;
    }
    if (account && bytes > 0) {
      account->make_room(bytes);
      std::size_t left = until_refusal_.load();
      if (left > 0 && until_refusal_.compare_exchange_strong(left, left - 1) && left == 1 &&
          account->evict_refused(bytes)) {
        num_refused_.fetch_add(1);
      }
    }
    void* const data = base_->raw_allocate(bytes);
    if (account && bytes > 0) {
      const std::lock_guard lock(mutex_);
      live_.insert_or_assign(data, std::pair(account_, bytes));
      account->allocated(bytes);
    }
    return {data, data, &FollowedAllocator::release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &FollowedAllocator::release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    base_->copy_data(target, source, bytes);
  }

 private:
  static void release(void* data) {
    FollowedAllocator& self = installed();
    std::pair<std::weak_ptr<DeviceAccount>, std::size_t> charge;
    {
      const std::lock_guard lock(self.mutex_);
      if (const auto found = self.live_.find(data); found != self.live_.end()) {
        charge = found->second;
        self.live_.erase(found);
      }
    }
    self.base_->raw_deallocate(data);
    if (const auto account = charge.first.lock()) {
      account->freed(charge.second);
    }
  }

  c10::Allocator* const base_;
  std::mutex mutex_;  // guards account_ and live_
  std::weak_ptr<DeviceAccount> account_;
  std::unordered_map<void*, std::pair<std::weak_ptr<DeviceAccount>, std::size_t>> live_;
  std::atomic<std::size_t> until_refusal_{0};
  std::atomic<std::size_t> num_refused_{0};
};

}  // namespace

void follow_torch_allocations(const std::shared_ptr<DeviceAccount>& account) {
  FollowedAllocator::installed().follow(account);
}

void count_allocations(bool counted) { counted_here = counted; }

std::size_t refuse_allocation(std::size_t n) { return FollowedAllocator::installed().refuse(n); }

}  // namespace castor::testing
