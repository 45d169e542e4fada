#include "cuda/pinned_pages.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <new>
#include <utility>

#include "core/units.h"
#include "cuda/cuda_error.h"
#include "cuda/scoped_device.h"

namespace castor::cuda {
namespace {

cudaError_t register_pages(std::byte* data, std::size_t bytes, int device) noexcept {
  try {
    const ScopedDevice current(device);
    const cudaError_t error =
        cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error != cudaSuccess)
      static_cast<void>(cudaGetLastError());  // reported by map(), not by the next caller's check
    return error;
  } catch (const CudaError& error) {
    return error.code();
  } catch (...) {
    return cudaErrorUnknown;
  }
}

cudaError_t unregister_pages(std::byte* data, int device) noexcept {
  try {
    const ScopedDevice current(device);
    const cudaError_t error = cudaHostUnregister(data);
    if (error != cudaSuccess)
      static_cast<void>(cudaGetLastError());
    return error;
  } catch (const CudaError& error) {
    return error.code();
  } catch (...) {
    return cudaErrorUnknown;
  }
}

}  // namespace

std::shared_ptr<void> lock_pages(std::span<std::byte> pages, int device) {
  if (const cudaError_t error = register_pages(pages.data(), pages.size(), device);
      error != cudaSuccess) {
    throw CudaError(error, "page-locking " + format_bytes(pages.size()));
  }
  return {pages.data(), [device](void* data) {
            // A failure leaves the pages locked until the process ends.
            static_cast<void>(unregister_pages(static_cast<std::byte*>(data), device));
          }};
}

PinnedPages::PinnedPages(std::unique_ptr<PageSource> upstream, int device)
    : upstream_(std::move(upstream)), device_(device) {}

PinnedPages::~PinnedPages() { assert(registrations_.empty() && "a block outlived its pages"); }

std::byte* PinnedPages::map(std::size_t bytes, std::size_t alignment) noexcept {
  std::byte* const data = upstream_->map(bytes, alignment);
  if (data == nullptr)
    return nullptr;
  upstream_->advise_huge(data, bytes, bytes);
  upstream_->withhold_from_children(data, bytes);
  upstream_->make_resident(data, bytes);  // else registering does, on this thread alone
  cudaError_t error = register_pages(data, bytes, device_);
  if (error == cudaSuccess && !add(data, bytes)) {
    static_cast<void>(unregister_pages(data, device_));
    error = cudaErrorMemoryAllocation;
  }
  if (error == cudaSuccess)
    return data;
  last_refusal_.store(error, std::memory_order_relaxed);
  num_refusals_.fetch_add(1, std::memory_order_relaxed);
  if (!upstream_->unmap(data, bytes) && !upstream_->discard(data, bytes))
    stuck_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  errno = ENOMEM;
  return nullptr;
}

bool PinnedPages::add(std::byte* data, std::size_t bytes) noexcept {
  try {
    const MutexLock lock(mutex_);
    registrations_.emplace(data, Registration{.bytes = bytes, .live_bytes = bytes});
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// One by one, each found anew: they may go while the lock is free.
bool PinnedPages::unmap(std::byte* data, std::size_t bytes) noexcept {
  std::byte* const end = data + bytes;
  while (data < end) {
    Registrations::node_type finished;
    {
      const MutexLock lock(mutex_);
      auto place = registrations_.upper_bound(data);
      assert(place != registrations_.begin() && "unmapped pages that map() did not give");
      if (place == registrations_.begin())
        return false;
      --place;
      std::byte* const registered_end = place->first + place->second.bytes;
      assert(data < registered_end && "unmapped pages that map() did not give");
      if (data >= registered_end)
        return false;
      std::byte* const part_end = std::min(end, registered_end);
      place->second.live_bytes -= static_cast<std::size_t>(part_end - data);
      data = part_end;
      if (place->second.live_bytes == 0)
        finished = registrations_.extract(place);
    }
    if (finished)
      remove(finished.key(), finished.mapped().bytes);
  }
  return true;
}

// What cannot be given back is lost, and said so; nobody may use it again.
void PinnedPages::remove(std::byte* data, std::size_t bytes) noexcept {
  if (const cudaError_t error = unregister_pages(data, device_); error != cudaSuccess) {
    last_refusal_.store(error, std::memory_order_relaxed);
    num_refusals_.fetch_add(1, std::memory_order_relaxed);
    stuck_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return;
  }
  if (!upstream_->unmap(data, bytes) && !upstream_->discard(data, bytes))
    stuck_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

bool PinnedPages::discard(std::byte* /*data*/, std::size_t /*bytes*/) noexcept { return false; }

void PinnedPages::advise_huge(std::byte* /*data*/, std::size_t /*used*/,
                              std::size_t /*mapped*/) noexcept {}

void PinnedPages::make_resident(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}

void PinnedPages::withhold_from_children(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}

void PinnedPages::share_with_children(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}

std::string PinnedPages::description() const {
  std::string text = upstream_->description() + ", registered with CUDA";
  if (const std::size_t refusals = num_refusals_.load(std::memory_order_relaxed); refusals > 0) {
    text += " (" + std::to_string(refusals) + " call(s) refused, the last with " +
            describe(last_refusal_.load(std::memory_order_relaxed)) + ")";
  }
  if (const std::size_t stuck = stuck_bytes_.load(std::memory_order_relaxed); stuck > 0)
    text += ", " + format_bytes(stuck) + " could not be given back";
  return text;
}

std::size_t PinnedPages::registered_bytes() const {
  const MutexLock lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [data, registration] : registrations_)
    bytes += registration.bytes;
  return bytes;
}

std::size_t PinnedPages::held_bytes() const {
  const MutexLock lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [data, registration] : registrations_)
    bytes += registration.bytes - registration.live_bytes;
  return bytes;
}

}  // namespace castor::cuda
