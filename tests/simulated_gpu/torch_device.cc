// What torch asks of a device: its streams and events, and its host memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>

#include "allocator.h"
#include "gpu.h"

namespace castor::simulated {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr std::size_t kPoolStreams = 32;  // as many as torch has for a GPU

c10::Stream pool_stream() {
  static std::atomic<std::size_t> next{0};
  static const std::array<std::uint64_t, kPoolStreams> pool = [] {
    std::array<std::uint64_t, kPoolStreams> ids{};
    for (auto& id : ids)
      id = Gpu::instance().new_stream()->id();
    return ids;
  }();
  return torch_stream(pool[next.fetch_add(1) % kPoolStreams]);
}

struct Event {
  Moment moment;
  std::shared_ptr<const TimeStamp> time;  // of the latest record, if it is timed
};

Event& event_of(void* event) { return *static_cast<Event*>(event); }
Moment& moment_of(void* event) { return event_of(event).moment; }

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return {kType, 0}; }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one simulated GPU, and no ", device);
  }
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override { return current_stream(); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return torch_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high*/) const override {
    return pool_stream();
  }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return pool_stream();
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    return Moment(queue_of(stream)).past();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++counts().host_waits;
    queue_of(stream)->synchronize();
    check_device();
  }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {
    ++counts().host_waits;
    Gpu::instance().synchronize();
    check_device();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag flag) const override {
    if (*event == nullptr)
      *event = new Event;
    const auto queue = queue_of(stream);
    if (flag == c10::EventFlag::BACKEND_DEFAULT)
      event_of(*event).time = stamp(*queue);
    moment_of(*event) = Moment(queue);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr)
      moment_of(event).block(*queue_of(stream));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || moment_of(event).past();
  }
  void synchronizeEvent(void* event) const override {
    ++counts().host_waits;
    if (event != nullptr)
      moment_of(event).wait();
    check_device();
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(queryEvent(start) && queryEvent(end), "an event is not past yet");
    return milliseconds(*event_of(start).time, *event_of(end).time);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};

/// Page-locked memory for torch's pin_memory(). As cudaFreeHost does, giving it back waits for the
/// device.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    constexpr std::size_t kAlignment = 4096;
    const std::size_t rounded = (bytes / kAlignment + 1) * kAlignment;
    void* const data = std::aligned_alloc(kAlignment, rounded);
    TORCH_CHECK(data != nullptr &&
                    Gpu::instance().register_host(static_cast<const std::byte*>(data), rounded) ==
                        Gpu::Registered::kYes,
                "no page-locked memory for ", bytes, " bytes");
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  static void release(void* data) {
    Gpu::instance().synchronize();
    static_cast<void>(Gpu::instance().unregister_host(static_cast<const std::byte*>(data)));
    std::free(data);
  }
};

/// For storages that torch makes by themselves (torch.load): whatever allocates for tensors now.
class StorageMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override { return current().allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return current().raw_deleter(); }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    current().copy_data(target, source, bytes);
  }

 private:
  static c10::Allocator& current() { return *c10::cuda::CUDACachingAllocator::get(); }
};

/// Random numbers are the CPU's, from its generator: the device draws the same ones.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(device_memory().contains(data), "that is no memory of the simulated GPU");
    return {kType, 0};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  bool isPinnedPtr(const void* data) const override { return Gpu::instance().is_registered(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedMemory memory;
    return &memory;
  }
  /// As CUDA's: other memory, with the bytes that fit it; none for no bytes.
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl.resizable(), "Trying to resize storage that is not resizable");
    c10::DataPtr other(nullptr, c10::Device(kType, 0));
    if (bytes > 0) {
      c10::Allocator& memory = *c10::cuda::CUDACachingAllocator::get();
      other = memory.allocate(bytes);
      if (const std::size_t kept = std::min(bytes, impl.nbytes()); kept > 0)
        memory.copy_data(other.get(), impl.data(), kept);
    }
    impl.set_data_ptr_noswap(std::move(other));
    impl.set_nbytes(bytes);
  }
};

}  // namespace

void add_device_to_torch() {
  static const c10::impl::DeviceGuardImplRegistrar guard(kType, new DeviceGuard);
  c10::SetAllocator(kType, new StorageMemory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::globalContext().lazyInitDevice(kType);  // before that torch takes no memory for page-locked
}

}  // namespace castor::simulated
