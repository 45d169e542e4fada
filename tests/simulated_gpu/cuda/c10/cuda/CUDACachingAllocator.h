#pragma once

// The part of torch's header of that name (2.11 to 2.15) that castor's sources use: the interface
// of its CUDA allocator, which one over the simulated GPU's memory implements.

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#pragma GCC visibility push(hidden)

namespace c10::cuda::CUDACachingAllocator {

using c10::CachingDeviceAllocator::AllocatorTraceTracker;
using c10::CachingDeviceAllocator::CreateContextFn;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::RecordContext;
using c10::CachingDeviceAllocator::TraceEntry;

struct AllocatorState {
  virtual ~AllocatorState() = default;
};
struct SnapshotInfo {};
struct CheckpointDelta {};
using OutOfMemoryObserver =
    std::function<void(int64_t device, size_t allocated, size_t device_total, size_t device_free)>;
using OomRejectionObserver =
    std::function<void(int64_t device, size_t rejected, size_t allocated, size_t device_total)>;
struct ShareableHandle {
  ptrdiff_t offset;
  std::string handle;
};
struct StreamSegmentSize {
  cudaStream_t stream;
  bool is_small_pool;
  size_t total_size;
};

/// Where torch's has a pure function that nothing here calls, this one has a default that refuses.
class CUDAAllocator : public DeviceAllocator {
 public:
  virtual void* raw_alloc(size_t nbytes) = 0;
  virtual void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) = 0;
  virtual void raw_delete(void* ptr) = 0;
  virtual void init(int device_count) = 0;
  virtual double getMemoryFraction(DeviceIndex device) = 0;
  virtual void setMemoryFraction(double fraction, DeviceIndex device) = 0;
  virtual void recordStream(const DataPtr& ptr, CUDAStream stream) = 0;
  void recordStream(const DataPtr& ptr, c10::Stream stream) override {
    recordStream(ptr, CUDAStream(stream));
  }
  virtual void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) = 0;
  virtual std::string name() = 0;

  virtual void enable(bool) { refuse("enable"); }
  virtual bool isEnabled() const { return true; }
  virtual void cacheInfo(DeviceIndex, size_t*) { refuse("cacheInfo"); }
  virtual void* getBaseAllocation(void*, size_t*) { refuse("getBaseAllocation"); }
  virtual std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex) { return {}; }
  virtual SnapshotInfo snapshot(MempoolId_t, bool) { refuse("snapshot"); }
  virtual void beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) {
    refuse("beginAllocateToPool");
  }
  virtual void endAllocateToPool(DeviceIndex, MempoolId_t) { refuse("endAllocateToPool"); }
  virtual void releasePool(DeviceIndex, MempoolId_t) { refuse("releasePool"); }
  virtual int getPoolUseCount(DeviceIndex, MempoolId_t) { refuse("getPoolUseCount"); }
  virtual void createOrIncrefPool(DeviceIndex, MempoolId_t, std::shared_ptr<CUDAAllocator>) {
    refuse("createOrIncrefPool");
  }
  virtual void setUseOnOOM(DeviceIndex, MempoolId_t, bool) { refuse("setUseOnOOM"); }
  virtual void setNoSplit(DeviceIndex, MempoolId_t) { refuse("setNoSplit"); }
  virtual bool checkPoolLiveAllocations(DeviceIndex, MempoolId_t,
                                        const std::unordered_set<void*>&) {
    refuse("checkPoolLiveAllocations");
  }
  virtual ShareableHandle shareIpcHandle(void*) { refuse("shareIpcHandle"); }
  virtual std::shared_ptr<void> getIpcDevPtr(std::string) { refuse("getIpcDevPtr"); }
  virtual bool isHistoryEnabled() { return false; }
  virtual void recordHistory(bool, CreateContextFn, size_t, RecordContext, bool,
                             const std::vector<std::string>&) {
    refuse("recordHistory");
  }
  virtual void recordAnnotation(const std::vector<std::pair<std::string, std::string>>&) {}
  virtual void pushCompileContext(std::string&) {}
  virtual void popCompileContext() {}
  virtual void setUserMetadata(const std::string&) {}
  virtual std::string getUserMetadata() { return ""; }
  virtual bool supportsUserMetadata() { return false; }
  virtual void annotateMemory(const void*, const std::string&) {}
  virtual std::shared_ptr<c10::GatheredContext> getContextForPointer(const void*) {
    return nullptr;
  }
  virtual DataPtr allocateWithAddress(size_t, void*) { refuse("allocateWithAddress"); }
  virtual void markCaptureBegin(DeviceIndex) {}
  virtual void markCaptureEnd(DeviceIndex) {}
  virtual void attachOomRejectionObserver(OomRejectionObserver) {
    refuse("attachOomRejectionObserver");
  }
  virtual void attachOutOfMemoryObserver(OutOfMemoryObserver) {
    refuse("attachOutOfMemoryObserver");
  }
  virtual void enablePeerAccess(DeviceIndex, DeviceIndex) {}
  virtual cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) {
    refuse("memcpyAsync");
  }
  virtual std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex, MempoolId_t) {
    refuse("getCheckpointState");
  }
  virtual CheckpointDelta setCheckpointPoolState(DeviceIndex, std::shared_ptr<AllocatorState>) {
    refuse("setCheckpointPoolState");
  }

 private:
  [[noreturn]] static void refuse(const char* function) {
    TORCH_CHECK(false, "the simulated GPU's allocator has no ", function);
    __builtin_unreachable();
  }
};

extern std::atomic<CUDAAllocator*> allocator;

inline CUDAAllocator* get() { return allocator.load(); }
inline void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) {
  return get()->raw_alloc_with_stream(nbytes, stream);
}
inline void raw_delete(void* ptr) { get()->raw_delete(ptr); }
inline void recordStream(const DataPtr& data, CUDAStream stream) {
  get()->recordStream(data, stream);
}
inline DeviceStats getDeviceStats(DeviceIndex device) { return get()->getDeviceStats(device); }

}  // namespace c10::cuda::CUDACachingAllocator

#pragma GCC visibility pop
