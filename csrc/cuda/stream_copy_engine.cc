#include "cuda/stream_copy_engine.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "core/check_copy.h"
#include "core/error.h"
#include "core/units.h"
#include "cuda/cuda_error.h"
#include "cuda/scoped_device.h"

namespace castor::cuda {
namespace {

using Bytes = std::span<const std::byte>;

constexpr auto kToDevice = static_cast<std::size_t>(CopyDirection::kHostToDevice);

bool touch(Bytes a, Bytes b) {
  const std::less<> before;  // a total order over pointers of different arrays
  return before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

bool contains(Bytes outer, Bytes inner) {
  const std::less_equal<> not_after;
  return not_after(outer.data(), inner.data()) &&
         not_after(inner.data() + inner.size(), outer.data() + outer.size());
}

std::string name_of(const CopyRequest& request) {
  return "the copy of " + format_bytes(request.source.size()) +
         (request.direction == CopyDirection::kHostToDevice ? " from host to device"
                                                            : " from device to host");
}

cudaPointerAttributes attributes_of(const std::byte* data) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
  return attributes;
}

}  // namespace

StreamCopyEngine::StreamCopyEngine(StreamCopyOptions options) : options_(std::move(options)) {
  if (!options_.compute_stream)
    throw InvalidArgument("StreamCopyEngine needs a compute stream to order its copies with");
  const ScopedDevice device(options_.device);
  try {
    for (Lane& lane : lanes_) {
      check(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
  } catch (...) {
    static_cast<void>(cudaStreamDestroy(lanes_[kToDevice].stream));
    throw;
  }
}

StreamCopyEngine::~StreamCopyEngine() {
  int before = 0;
  const bool known = cudaGetDevice(&before) == cudaSuccess;
  static_cast<void>(cudaSetDevice(options_.device));
  // A failure here was, or will be, reported by whatever else uses the device.
  for (const Lane& lane : lanes_) {
    static_cast<void>(cudaStreamSynchronize(lane.stream));
    static_cast<void>(cudaStreamDestroy(lane.stream));
  }
  events_.clear();
  if (known)
    static_cast<void>(cudaSetDevice(before));
}

void StreamCopyEngine::check_memory(const CopyRequest& request) const {
  const bool to_device = request.direction == CopyDirection::kHostToDevice;
  const auto on_host = attributes_of(to_device ? request.source.data() : request.target.data());
  if (on_host.type != cudaMemoryTypeHost) {
    throw InvalidArgument(name_of(request) +
                          " needs page-locked host memory, and the host's side is not: CUDA would "
                          "copy it through a buffer of its own and block; take it from a host "
                          "arena with pinned pages");
  }
  const auto on_device = attributes_of(to_device ? request.target.data() : request.source.data());
  if (on_device.type != cudaMemoryTypeDevice || on_device.device != options_.device) {
    throw InvalidArgument(name_of(request) + " needs memory of CUDA device " +
                          std::to_string(options_.device) + " on the device's side; it is " +
                          (on_device.type == cudaMemoryTypeDevice
                               ? "memory of device " + std::to_string(on_device.device)
                               : "no device memory"));
  }
}

CopyTicket StreamCopyEngine::submit(const CopyRequest& request) {
  check_copy(request);
  const auto direction = static_cast<std::size_t>(request.direction);
  const ScopedDevice device(options_.device);
  if (!request.source.empty())
    check_memory(request);
  const std::lock_guard lock(mutex_);
  Lane& lane = lanes_[direction];
  reap(lane);
  if (direction == kToDevice) {
    follow_releases(lane.stream, request.target);
  } else {
    follow_compute(lane.stream);
  }
  follow_other_lane(request, lane.stream);
  enqueue(lane, request);
  return CopyTicket{2 * lane.num_submitted() + direction};
}

// From here on `stream` is behind all that has been submitted to the compute stream.
void StreamCopyEngine::follow_compute(cudaStream_t stream) {
  const cudaEvent_t event = events_.take();
  const cudaError_t recorded = cudaEventRecord(event, options_.compute_stream());
  const cudaError_t followed =
      recorded == cudaSuccess ? cudaStreamWaitEvent(stream, event, 0) : recorded;
  events_.give_back(event);
  check(followed, "ordering a copy behind the compute stream");
}

void StreamCopyEngine::follow_releases(cudaStream_t stream, Bytes target) {
  const bool released =
      std::any_of(releases_.begin(), releases_.end(),
                  [&](const Release& release) { return contains(release.slot, target); });
  if (!released)
    follow_compute(stream);
  for (const Release& release : releases_) {
    if (released && touch(release.slot, target)) {
      check(cudaStreamWaitEvent(stream, release.event, 0),
            "ordering a copy behind a released slot");
    }
  }
  // The bytes get a new user, about whom they say nothing.
  std::erase_if(releases_, [&](const Release& old) {
    if (!touch(old.slot, target))
      return false;
    events_.give_back(old.event);
    return true;
  });
}

void StreamCopyEngine::follow_other_lane(const CopyRequest& request, cudaStream_t stream) {
  Lane& other = lanes_[1 - static_cast<std::size_t>(request.direction)];
  reap(other);
  // The last one that touches the same bytes is behind the others of its stream.
  const auto copy =
      std::find_if(other.pending.rbegin(), other.pending.rend(), [&](const Copy& earlier) {
        return touch(earlier.request.source, request.target) ||
               touch(earlier.request.target, request.source);
      });
  if (copy != other.pending.rend())
    check(cudaStreamWaitEvent(stream, copy->event, 0), "ordering a copy behind another");
}

void StreamCopyEngine::enqueue(Lane& lane, const CopyRequest& request) {
  lane.pending.push_back({request, nullptr});
  cudaError_t error = cudaSuccess;
  try {
    lane.pending.back().event = events_.take();
  } catch (...) {
    lane.pending.pop_back();
    throw;
  }
  const cudaEvent_t event = lane.pending.back().event;
  if (!request.source.empty()) {
    error =
        cudaMemcpyAsync(request.target.data(), request.source.data(), request.source.size(),
                        request.direction == CopyDirection::kHostToDevice ? cudaMemcpyHostToDevice
                                                                          : cudaMemcpyDeviceToHost,
                        lane.stream);
  }
  if (error == cudaSuccess)
    error = cudaEventRecord(event, lane.stream);
  if (error != cudaSuccess) {
    // Should the copy be under way all the same, it must not outlive its buffers.
    static_cast<void>(cudaStreamSynchronize(lane.stream));
    lane.pending.pop_back();
    events_.give_back(event);
    throw CudaError(error, name_of(request));
  }
}

StreamCopyEngine::Place StreamCopyEngine::place_of(CopyTicket ticket) const {
  const auto value = static_cast<std::uint64_t>(ticket);
  const Place place{.direction = value % 2, .number = value / 2};
  const std::uint64_t last = lanes_[place.direction].num_submitted();
  if (place.number > last || value == 1) {
    throw InvalidArgument("copy ticket " + std::to_string(value) + " was never given out; copy " +
                          std::to_string(last) + " is the last of its direction");
  }
  return place;
}

void StreamCopyEngine::reap(Lane& lane) {
  while (!lane.pending.empty()) {
    const Copy& copy = lane.pending.front();
    const cudaError_t state = cudaEventQuery(copy.event);
    if (state == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // or it would be the next caller's "last error"
      return;
    }
    if (state != cudaSuccess)
      throw CudaError(state, name_of(copy.request));
    events_.give_back(copy.event);
    lane.pending.pop_front();
    ++lane.num_done;
  }
}

const StreamCopyEngine::Copy* StreamCopyEngine::find(Place place) {
  Lane& lane = lanes_[place.direction];
  reap(lane);
  return place.number <= lane.num_done ? nullptr : &lane.pending[place.number - lane.num_done - 1];
}

void StreamCopyEngine::wait(CopyTicket ticket) {
  {
    const std::lock_guard lock(mutex_);
    const Place place = place_of(ticket);
    if (place.direction == kToDevice) {
      const ScopedDevice device(options_.device);
      if (const Copy* copy = find(place)) {
        check(cudaStreamWaitEvent(options_.compute_stream(), copy->event, 0),
              "making the compute stream wait for a copy");
      }
      return;
    }
  }
  synchronize(ticket);
}

void StreamCopyEngine::synchronize(CopyTicket ticket) {
  const ScopedDevice device(options_.device);
  std::unique_lock lock(mutex_);
  const Place place = place_of(ticket);
  const Copy* const copy = find(place);
  if (copy == nullptr)
    return;
  // Unlocked while it waits. If somebody reaps the copy and its event is recorded again, the wait
  // is for a later copy: too long, never too short.
  const cudaEvent_t event = copy->event;
  const std::string name = name_of(copy->request);
  lock.unlock();
  if (const cudaError_t error = cudaEventSynchronize(event); error != cudaSuccess)
    throw CudaError(error, name);
}

bool StreamCopyEngine::done(CopyTicket ticket) {
  const std::lock_guard lock(mutex_);
  const ScopedDevice device(options_.device);
  return find(place_of(ticket)) == nullptr;
}

void StreamCopyEngine::release(Bytes slot) {
  const std::lock_guard lock(mutex_);
  const ScopedDevice device(options_.device);
  releases_.reserve(releases_.size() + 1);
  const cudaEvent_t event = events_.take();
  if (const cudaError_t error = cudaEventRecord(event, options_.compute_stream());
      error != cudaSuccess) {
    events_.give_back(event);
    throw CudaError(error, "recording the release of a slot");
  }
  releases_.push_back({slot, event});
}

void StreamCopyEngine::forget(Bytes slot) {
  const std::lock_guard lock(mutex_);
  std::erase_if(releases_, [&](const Release& release) {
    if (!touch(release.slot, slot))
      return false;
    events_.give_back(release.event);
    return true;
  });
}

}  // namespace castor::cuda
