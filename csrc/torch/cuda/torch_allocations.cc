#include "torch/cuda/torch_allocations.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/stream_order.h"
#include "torch/cuda/caching_arena.h"
#include "torch/cuda/followed_allocator.h"
#include "torch/gil.h"

namespace castor {
namespace {

constexpr std::size_t kMaxDevices = 128;

thread_local int own_depth = 0;
std::array<std::atomic<std::ptrdiff_t>, kMaxDevices> own_bytes{};

/// Who pays on each device. Thread-safe; its mutex is the last one taken.
class Accounts {
 public:
  using Pointers = std::vector<std::shared_ptr<DeviceAccount>>;

  /// Never destroyed: the allocator tells of what is freed until the process ends.
  static Accounts& instance() {
    static Accounts* const accounts = new Accounts;
    return *accounts;
  }
  void add(c10::DeviceIndex device, const std::shared_ptr<DeviceAccount>& account) {
    const MutexLock lock(mutex_);
    auto& accounts = of_device(device);
    std::erase_if(accounts, [](const auto& other) { return other.expired(); });
    accounts.push_back(account);
  }
  [[nodiscard]] Pointers find(c10::DeviceIndex device) {
    const MutexLock lock(mutex_);
    Pointers alive;
    for (const auto& account : of_device(device)) {
      if (auto pointer = account.lock())
        alive.push_back(std::move(pointer));
    }
    return alive;
  }

 private:
  [[nodiscard]] std::vector<std::weak_ptr<DeviceAccount>>& of_device(c10::DeviceIndex device)
      CASTOR_REQUIRES(mutex_) {
    return accounts_[static_cast<std::size_t>(device)];
  }

  Mutex mutex_;
  std::array<std::vector<std::weak_ptr<DeviceAccount>>, kMaxDevices> accounts_
      CASTOR_GUARDED_BY(mutex_);
};

namespace allocator = c10::cuda::CUDACachingAllocator;

/// Room before; where the device refuses all the same, chunks leave until it does not, or none may.
/// Once as many bytes as were asked for may not do: what came free lies in pieces.
struct WithRoom {
  /// Whether `data` is castor's, and the stream is known to use it now.
  [[nodiscard]] static bool record_stream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
    return own_blocks(stream.device_index())
        .record(static_cast<const std::byte*>(data.get()), cuda::stream_id(stream.stream()));
  }

  template <typename Allocate>
  auto operator()(std::size_t bytes, const Allocate& allocate) const -> decltype(allocate()) {
    if (OwnAllocation::under_way() || bytes == 0)
      return allocate();
    const auto accounts = Accounts::instance().find(c10::cuda::current_device());
    if (accounts.empty())
      return allocate();
    {
      const GilRelease released;  // torch.tensor() allocates with it
      for (const auto& account : accounts)
        account->make_room(allocated_for(bytes));
    }
    while (true) {
      try {
        return allocate();
      } catch (const c10::OutOfMemoryError&) {
        bool evicted = false;
        const GilRelease released;
        for (const auto& account : accounts)
          evicted |= account->evict_refused(allocated_for(bytes));
        if (!evicted)
          throw;
      }
    }
  }
};

// Under the allocator's lock.
void note(const allocator::TraceEntry& entry) {
  using Action = allocator::TraceEntry::Action;
  const bool taken = entry.action_ == Action::ALLOC;
  if ((!taken && entry.action_ != Action::FREE_REQUESTED) || OwnAllocation::under_way())
    return;
  for (const auto& account : Accounts::instance().find(entry.device_)) {
    if (taken) {
      account->allocated(allocated_for(entry.size_));
    } else {
      account->freed(allocated_for(entry.size_));
    }
  }
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    allocator::CUDAAllocator* const base = allocator::get();
    if (base->name() != "native") {
      throw Error("castor follows torch's own CUDA allocator, and this process uses '" +
                  base->name() + "': leave backend out of PYTORCH_CUDA_ALLOC_CONF");
    }
    base->attachAllocatorTraceTracker(&note);
    // Never destroyed: storages keep its address.
    allocator::allocator.store(new detail::FollowedAllocator<WithRoom>(base, WithRoom{}));
  });
}

}  // namespace

void follow_torch_allocations(c10::DeviceIndex device,
                              const std::shared_ptr<DeviceAccount>& account) {
  install();
  // What is there already, but for castor's own.
  const auto allocated = static_cast<std::ptrdiff_t>(cached_bytes(device).allocated);
  const std::ptrdiff_t others =
      allocated - own_bytes[static_cast<std::size_t>(device)].load(std::memory_order_relaxed);
  account->allocated(static_cast<std::size_t>(std::max<std::ptrdiff_t>(others, 0)));
  Accounts::instance().add(device, account);
}

OwnAllocation::OwnAllocation() noexcept { ++own_depth; }
OwnAllocation::~OwnAllocation() { --own_depth; }
bool OwnAllocation::under_way() noexcept { return own_depth > 0; }

cuda::BlockStreams& own_blocks(c10::DeviceIndex device) noexcept {
  // Never destroyed: blocks may go back until the process ends.
  static auto* const blocks = [] {
    auto* const made = new std::vector<std::unique_ptr<cuda::BlockStreams>>;
    for (std::size_t i = 0; i < kMaxDevices; ++i)
      made->push_back(std::make_unique<cuda::BlockStreams>(static_cast<int>(i)));
    return made;
  }();
  return *(*blocks)[static_cast<std::size_t>(device)];
}

void count_own_bytes(c10::DeviceIndex device, std::ptrdiff_t bytes) noexcept {
  own_bytes[static_cast<std::size_t>(device)].fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace castor
