#include "torch/cuda/caching_arena.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/error.h"
#include "cuda/block_streams.h"
#include "cuda/stream_order.h"
#include "torch/cuda/torch_allocations.h"

namespace castor {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

[[noreturn]] void throw_out_of_memory(std::size_t bytes, const std::string& reason) {
  std::size_t available = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&available, &total) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    available = total = 0;
  }
  throw OutOfMemory(TierKind::kDevice, bytes, available, total,
                    "torch's CUDA allocator refused (figures: free and installed memory of the "
                    "GPU): " +
                        reason + " Lower device_memory, or free what else uses the GPU");
}

/// Of small and large blocks together.
const c10::CachingAllocator::Stat& aggregate(const c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

}  // namespace

CachingArena::CachingArena(c10::DeviceIndex device) : device_(device) {
  const int count = c10::cuda::device_count();
  if (device < 0 || device >= count) {
    throw InvalidArgument("there is no CUDA device " + std::to_string(device) + "; torch sees " +
                          std::to_string(count));
  }
}

std::byte* CachingArena::allocate(std::size_t bytes) {
  return allocate_on(bytes, cuda::stream_id(c10::cuda::getCurrentCUDAStream(device_).stream()));
}

void CachingArena::deallocate(std::byte* data, std::size_t bytes) noexcept {
  deallocate_behind(data, bytes,
                    cuda::stream_id(c10::cuda::getCurrentCUDAStream(device_).stream()));
}

std::byte* CachingArena::allocate_on(std::size_t bytes, StreamId stream) {
  const c10::cuda::CUDAGuard guard(device_);
  try {
    const OwnAllocation own;
    auto* const data =
        static_cast<std::byte*>(allocator::raw_alloc_with_stream(bytes, cuda::handle_of(stream)));
    own_blocks(device_).add(data, bytes, stream);
    count_own_bytes(device_, static_cast<std::ptrdiff_t>(allocated_for(bytes)));
    return data;
  } catch (const c10::OutOfMemoryError& error) {
    throw_out_of_memory(bytes, error.what_without_backtrace());
  }
}

void CachingArena::deallocate_behind(std::byte* data, std::size_t bytes, StreamId stream) noexcept {
  own_blocks(device_).remove(data, stream);
  const OwnAllocation own;
  allocator::raw_delete(data);
  count_own_bytes(device_, -static_cast<std::ptrdiff_t>(allocated_for(bytes)));
}

void CachingArena::add_user(const std::byte* data, StreamId stream) {
  static_cast<void>(own_blocks(device_).record(data, stream));
}

void CachingArena::await_users(const std::byte* data, StreamId stream) {
  own_blocks(device_).await_users(data, stream);
}

std::string CachingArena::description() const {
  return "torch's CUDA caching allocator (" + allocator::get()->name() + "), device " +
         std::to_string(device_);
}

CachedBytes cached_bytes(c10::DeviceIndex device) {
  const auto stats = allocator::getDeviceStats(device);
  const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  return {.allocated = bytes(aggregate(stats.allocated_bytes).current),
          .peak_allocated = bytes(aggregate(stats.allocated_bytes).peak),
          .reserved = bytes(aggregate(stats.reserved_bytes).current)};
}

}  // namespace castor
