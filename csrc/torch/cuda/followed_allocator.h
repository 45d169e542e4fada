#pragma once

// Internal to csrc/torch/cuda: the interface of torch's CUDA allocator, which grows with each
// release.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch/torch_versions.h"

namespace castor::detail {

/// Torch's CUDA allocator with a call of `Around` around each allocation; all other calls are
/// handed on. `Around` is called with the bytes and a function that allocates, and returns what
/// that function does. Its record_stream returns true for memory of its own: torch's allocator is
/// not told of that use.
template <typename Around>
class FollowedAllocator final : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
  using Base = c10::cuda::CUDACachingAllocator::CUDAAllocator;
  using Device = c10::DeviceIndex;
  using Pool = c10::MempoolId_t;

 public:
  FollowedAllocator(Base* base, Around around) : base_(base), around_(std::move(around)) {}

  c10::DataPtr allocate(std::size_t n) override {
    return around_(n, [&] { return base_->allocate(n); });
  }
  void* raw_alloc(std::size_t n) override {
    return around_(n, [&] { return base_->raw_alloc(n); });
  }
  void* raw_alloc_with_stream(std::size_t n, cudaStream_t stream) override {
    return around_(n, [&] { return base_->raw_alloc_with_stream(n, stream); });
  }

  void raw_delete(void* data) override { base_->raw_delete(data); }
  c10::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter(); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return base_->is_simple_data_ptr(data);
  }
  void copy_data(void* target, const void* source, std::size_t n) const override {
    base_->copy_data(target, source, n);
  }
  bool initialized() override { return base_->initialized(); }
  void emptyCache(Pool pool) override { base_->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Device device) override {
    return base_->getDeviceStats(device);
  }
  void resetAccumulatedStats(Device device) override { base_->resetAccumulatedStats(device); }
  void resetPeakStats(Device device) override { base_->resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(Device device) override {
    return base_->getMemoryInfo(device);
  }
  void init(int device_count) override { base_->init(device_count); }
  double getMemoryFraction(Device device) override { return base_->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Device device) override {
    base_->setMemoryFraction(fraction, device);
  }
  std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> getExpandableSegmentSizes(
      Device device) override {
    return base_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { base_->enable(value); }
  bool isEnabled() const override { return base_->isEnabled(); }
  void cacheInfo(Device device, std::size_t* largest) override {
    base_->cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* data, std::size_t* size) override {
    return base_->getBaseAllocation(data, size);
  }
  using Base::recordStream;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    if (!around_.record_stream(data, stream)) {
      base_->recordStream(data, stream);
    }
  }
  c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(Pool pool, bool traces) override {
    return base_->snapshot(pool, traces);
  }
  void beginAllocateToPool(Device device, Pool pool,
                           std::function<bool(cudaStream_t)> filter) override {
    base_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Device device, Pool pool) override {
    base_->endAllocateToPool(device, pool);
  }
  void releasePool(Device device, Pool pool) override { base_->releasePool(device, pool); }
  int getPoolUseCount(Device device, Pool pool) override {
    return base_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(Device device, Pool pool, std::shared_ptr<Base> allocator) override {
    base_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(Device device, Pool pool, bool use) override {
    base_->setUseOnOOM(device, pool, use);
  }
  void setNoSplit(Device device, Pool pool) override { base_->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(Device device, Pool pool,
                                const std::unordered_set<void*>& expected) override {
    return base_->checkPoolLiveAllocations(device, pool, expected);
  }
  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* data) override {
    return base_->shareIpcHandle(data);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return base_->getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return base_->isHistoryEnabled(); }
  void recordHistory(bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder,
                     std::size_t max_entries, c10::CachingDeviceAllocator::RecordContext when,
                     bool clear, const std::vector<std::string>& skip) override {
    base_->recordHistory(enabled, recorder, max_entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& entries) override {
    base_->recordAnnotation(entries);
  }
  void pushCompileContext(std::string& context) override { base_->pushCompileContext(context); }
  void popCompileContext() override { base_->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { base_->setUserMetadata(metadata); }
  std::string getUserMetadata() override { return base_->getUserMetadata(); }
  void attachOutOfMemoryObserver(
      c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) override {
    base_->attachOutOfMemoryObserver(std::move(observer));
  }
#if CASTOR_TORCH_AT_LEAST(12)
  void attachOomRejectionObserver(
      c10::cuda::CUDACachingAllocator::OomRejectionObserver observer) override {
    base_->attachOomRejectionObserver(std::move(observer));
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override {
    return base_->getContextForPointer(data);
  }
#endif
#if CASTOR_TORCH_AT_LEAST(13)
  c10::DataPtr allocateWithAddress(std::size_t n, void* address) override {
    return around_(n, [&] { return base_->allocateWithAddress(n, address); });
  }
  void markCaptureBegin(Device device) override { base_->markCaptureBegin(device); }
  void markCaptureEnd(Device device) override { base_->markCaptureEnd(device); }
#endif
#if CASTOR_TORCH_AT_LEAST(14)
  bool supportsUserMetadata() override { return base_->supportsUserMetadata(); }
  void annotateMemory(const void* data, const std::string& metadata) override {
    base_->annotateMemory(data, metadata);
  }
#endif
  void attachAllocatorTraceTracker(
      c10::CachingDeviceAllocator::AllocatorTraceTracker tracker) override {
    base_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(Device device, Device other) override {
    base_->enablePeerAccess(device, other);
  }
  cudaError_t memcpyAsync(void* target, int target_device, const void* source, int source_device,
                          std::size_t count, cudaStream_t stream, bool p2p) override {
    return base_->memcpyAsync(target, target_device, source, source_device, count, stream, p2p);
  }
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> getCheckpointState(
      Device device, Pool pool) override {
    return base_->getCheckpointState(device, pool);
  }
  c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
      Device device,
      std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state) override {
    return base_->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return base_->name(); }

 private:
  Base* const base_;
  const Around around_;
};

}  // namespace castor::detail
