#include "torch/counting_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/mutex.h"
#include "torch/gil.h"
#include "torch/torch_error.h"

namespace castor {
namespace {

std::shared_ptr<NonModelMemory>& account_of_this_thread() noexcept {
  thread_local std::shared_ptr<NonModelMemory> account;
  return account;
}

constexpr std::size_t kNumShards = 64;

/// Addresses are multiples of 64 and often of 4096: what is taken of one is mixed before.
std::size_t mixed(const void* data) noexcept {
  return (reinterpret_cast<std::uintptr_t>(data) >> 6) * 0x9E3779B97F4A7C15ULL >> 32;
}

/// Who pays for what, by address, without a node of its own for each: nodes between tensors would
/// cost torch's allocations more time than they cost us. Open addressing, at most half full.
class AddressTable {
 public:
  struct Charge {
    std::shared_ptr<NonModelMemory> account;
    std::size_t bytes = 0;
  };

  void insert(void* data, Charge charge) {
    if (2 * (size_ + 1) > entries_.size()) {
      grow();
    }
    Entry& entry = entries_[find(data)];
    size_ += entry.data == nullptr ? 1 : 0;
    entry = {data, std::move(charge)};
  }

  /// Removes and returns the charge of `data`; one without account when there is none.
  Charge take(void* data) noexcept {
    if (size_ == 0) {
      return {};
    }
    std::size_t hole = find(data);
    if (entries_[hole].data == nullptr) {
      return {};
    }
    Charge charge = std::move(entries_[hole].charge);
    // What stands behind the hole and was looked for from before it moves up, so that no search
    // ends too soon.
    for (std::size_t i = next(hole); entries_[i].data != nullptr; i = next(i)) {
      const std::size_t home = home_of(entries_[i].data);
      if (((i - home) & mask()) >= ((i - hole) & mask())) {
        entries_[hole] = std::move(entries_[i]);
        hole = i;
      }
    }
    entries_[hole] = {};
    --size_;
    return charge;
  }

 private:
  struct Entry {
    void* data = nullptr;
    Charge charge;
  };

  [[nodiscard]] std::size_t mask() const noexcept { return entries_.size() - 1; }
  // Shards take the low bits of what is mixed.
  [[nodiscard]] std::size_t home_of(const void* data) const noexcept {
    return mixed(data) / kNumShards & mask();
  }
  [[nodiscard]] std::size_t next(std::size_t i) const noexcept { return (i + 1) & mask(); }

  /// Where `data` is, or would be. Needs a free entry.
  [[nodiscard]] std::size_t find(const void* data) const noexcept {
    std::size_t i = home_of(data);
    while (entries_[i].data != nullptr && entries_[i].data != data) {
      i = next(i);
    }
    return i;
  }

  void grow() {
    std::vector<Entry> before(std::max<std::size_t>(2 * entries_.size(), 16));
    before.swap(entries_);
    for (Entry& entry : before) {
      if (entry.data != nullptr) {
        entries_[find(entry.data)] = std::move(entry);
      }
    }
  }

  std::vector<Entry> entries_;  // a power of two
  std::size_t size_ = 0;
};

/// The live allocations that are charged, by address. Torch's raw_allocate demands that a pointer's
/// context is the data itself, so the account cannot travel in the context. Thread-safe.
class ChargedAllocations {
 public:
  using Charge = AddressTable::Charge;

  void add(void* data, Charge charge) {
    Shard& shard = shard_of(data);
    const MutexLock lock(shard.mutex);
    shard.charges.insert(data, std::move(charge));
  }

  /// Removes and returns the charge of `data`; one without account when nobody paid.
  Charge take(void* data) noexcept {
    Shard& shard = shard_of(data);
    const MutexLock lock(shard.mutex);
    return shard.charges.take(data);
  }

 private:
  struct Shard {
    Mutex mutex;
    AddressTable charges CASTOR_GUARDED_BY(mutex);
  };

  Shard& shard_of(void* data) { return shards_[mixed(data) % kNumShards]; }

  std::array<Shard, kNumShards> shards_;
};

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) : base_(base) {}

  /// The one in place; nullptr before install_counting_allocator.
  static CountingAllocator*& installed() noexcept {
    static CountingAllocator* allocator = nullptr;
    return allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    auto& account = account_of_this_thread();
    if (account && account->orphaned()) {
      account.reset();  // a model died between its forward and the end of its step
    }
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
  void forgive(void* data) noexcept {
    const ChargedAllocations::Charge charge = charged_.take(data);
    if (charge.account) {
      charge.account->free(charge.bytes);
    }
  }

 private:
  static void release(void* data) {
    CountingAllocator& self = *installed();
    // Before the memory goes: its address may be given out again at once.
    const ChargedAllocations::Charge charge = self.charged_.take(data);
    self.base_->raw_deallocate(data);
    if (charge.account) {
      charge.account->free(charge.bytes);
    }
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

const std::shared_ptr<NonModelMemory>& charged_account() noexcept {
  return account_of_this_thread();
}

void charge_allocations_to(const std::shared_ptr<NonModelMemory>& account) noexcept {
  if (account_of_this_thread() != account) {
    account_of_this_thread() = account;
  }
}

}  // namespace castor
