#include "allocator.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ApproximateClock.h>

#include <cstring>
#include <utility>

namespace castor::simulated {
namespace {

constexpr std::size_t kCapacity = std::size_t{4} << 30;
constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

thread_local c10::StreamId current_id = 0;

/// torch's caching allocator of the simulated GPU. What it does not do is refused.
class Allocator final : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;

 public:
  void* raw_alloc(std::size_t bytes) override {
    return allocate_on(bytes, current_queue(), refusals().tensors);
  }
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    return allocate_on(bytes, Gpu::instance().stream(reinterpret_cast<std::uintptr_t>(stream)),
                       refusals().blocks);
  }
  void raw_delete(void* data) override { release(data); }
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const data = raw_alloc(bytes);
    return {data, data, &release, c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    current_queue()->enqueue([=] { std::memcpy(target, source, bytes); });
  }

  using CUDAAllocator::recordStream;
  // Memory that is not the allocator's is left alone, as torch does.
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    if (data.get() != nullptr && data.get_deleter() == &release)
      device_memory().record(static_cast<std::byte*>(data.get_context()),
                             queue_of(stream.unwrap()));
  }

  bool initialized() override { return true; }
  void init(int /*device_count*/) override {}
  void emptyCache(c10::MempoolId_t /*pool*/) override { device_memory().release_cached(); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    const DeviceMemory::Figures figures = device_memory().figures();
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto set = [](c10::CachingAllocator::StatArray& array, std::size_t now,
                        std::size_t peak) {
      auto& stat = array[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      stat.current = static_cast<std::int64_t>(now);
      stat.peak = static_cast<std::int64_t>(peak);
    };
    set(stats.allocated_bytes, figures.allocated, figures.peak_allocated);
    set(stats.reserved_bytes, figures.reserved, figures.peak_reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override { device_memory().reset_peaks(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override {
    return {device_memory().available(), device_memory().capacity()};
  }
  double getMemoryFraction(c10::DeviceIndex /*device*/) override {
    return static_cast<double>(device_memory().limit()) /
           static_cast<double>(device_memory().capacity());
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex /*device*/) override {
    device_memory().limit(fraction);
  }
  void attachAllocatorTraceTracker(
      c10::CachingDeviceAllocator::AllocatorTraceTracker tracker) override {
    device_memory().track([tracker = std::move(tracker)](DeviceMemory::Action action,
                                                         std::byte* data, std::size_t bytes) {
      tracker(Entry(
          action == DeviceMemory::Action::kAllocated ? Entry::ALLOC : Entry::FREE_REQUESTED, 0,
          reinterpret_cast<std::size_t>(data), bytes, nullptr, {0, 0}, c10::getApproximateTime()));
    });
  }
  std::string name() override { return "native"; }

 private:
  static void* allocate_on(std::size_t bytes, const std::shared_ptr<Stream>& stream,
                           Refusals& refusals) {
    if (bytes == 0)
      return nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, !refusals.now(), "the simulated device refuses");
    void* const data = device_memory().allocate(bytes, stream);
    const DeviceMemory::Figures figures = device_memory().figures();
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr,
                     "the simulated GPU is out of memory: tried to allocate ", bytes, " bytes; of ",
                     device_memory().limit(), " that may be used ", figures.allocated,
                     " are allocated.");
    return data;
  }
  static void release(void* data) {
    if (data != nullptr)
      device_memory().free(static_cast<std::byte*>(data));
  }
};

}  // namespace

DeviceMemory& device_memory() {
  static DeviceMemory* const memory = new DeviceMemory(kCapacity);  // tensors may outlive statics
  return *memory;
}

AllocatorRefusals& refusals() {
  static AllocatorRefusals all;
  return all;
}

Counts& counts() {
  static Counts all;
  return all;
}

c10::Stream torch_stream(std::uint64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), static_cast<c10::StreamId>(id));
}

c10::Stream current_stream() { return torch_stream(static_cast<std::uint64_t>(current_id)); }

std::shared_ptr<Stream> queue_of(const c10::Stream& stream) {
  return Gpu::instance().stream(static_cast<std::uint64_t>(stream.id()));
}

std::shared_ptr<Stream> current_queue() { return queue_of(current_stream()); }

c10::Stream exchange_stream(c10::Stream stream) {
  return torch_stream(static_cast<std::uint64_t>(std::exchange(current_id, stream.id())));
}

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  c10::cuda::CUDACachingAllocator::recordStream(data, c10::cuda::CUDAStream(stream));
}

void check_device() {
  if (const auto message = Gpu::instance().error().message())
    TORCH_CHECK(false, "the simulated GPU failed in an earlier operation: ", *message);
}

}  // namespace castor::simulated

namespace c10::cuda {

CUDAStream getCurrentCUDAStream(DeviceIndex /*device*/) {
  return CUDAStream(castor::simulated::current_stream());
}
CUDAStream getDefaultCUDAStream(DeviceIndex /*device*/) {
  return CUDAStream(castor::simulated::torch_stream(0));
}
CUDAStream getStreamFromExternal(cudaStream_t stream, DeviceIndex /*device*/) {
  return CUDAStream(castor::simulated::torch_stream(reinterpret_cast<std::uintptr_t>(stream)));
}
void setCurrentCUDAStream(CUDAStream stream) {
  castor::simulated::exchange_stream(stream.unwrap());
}

namespace CUDACachingAllocator {
// Never destroyed, as storages keep its address.
std::atomic<CUDAAllocator*> allocator{new castor::simulated::Allocator};
}  // namespace CUDACachingAllocator

}  // namespace c10::cuda
