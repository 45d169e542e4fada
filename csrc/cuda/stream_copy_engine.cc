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
#include "cuda/stream_order.h"

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

StreamCopyEngine::StreamCopyEngine(int device) : device_(device) {
  const ScopedDevice current(device_);
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
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] {
      return lanes_[0].num_enqueued == num_submitted(0) &&
             lanes_[1].num_enqueued == num_submitted(1);
    });
  }
  for (Lane& lane : lanes_)
    lane.worker = {};  // stops and joins
  int before = 0;
  const bool known = cudaGetDevice(&before) == cudaSuccess;
  static_cast<void>(cudaSetDevice(device_));
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
  if (on_device.type != cudaMemoryTypeDevice || on_device.device != device_) {
    throw InvalidArgument(name_of(request) + " needs memory of CUDA device " +
                          std::to_string(device_) + " on the device's side; it is " +
                          (on_device.type == cudaMemoryTypeDevice
                               ? "memory of device " + std::to_string(on_device.device)
                               : "no device memory"));
  }
}

CopyTicket StreamCopyEngine::submit(const CopyRequest& request) {
  check_copy(request);
  const auto direction = static_cast<std::size_t>(request.direction);
  const ScopedDevice current(device_);
  if (!request.source.empty())
    check_memory(request);
  const std::lock_guard lock(mutex_);
  Lane& lane = lanes_[direction];
  reap(direction);
  reap(1 - direction);
  Copy& copy = lane.pending.emplace_back();
  try {
    copy.request = request;
    copy.order = ++num_copies_;
    if (direction == kToDevice)
      copy.behind = take_releases(request.target);
    if (copy.behind.empty())
      copy.behind.push_back(record(request.behind));
    const Copy* const other = conflict(copy, direction);
    const bool first = lane.num_enqueued + 1 == num_submitted(direction);
    if (first && !request.await_source && (other == nullptr || other->enqueued)) {
      enqueue(copy, direction);
    } else if (!lane.worker.joinable()) {
      lane.worker =
          std::jthread([this, direction](const std::stop_token& stop) { work(stop, direction); });
    }
  } catch (...) {
    forget_events(copy);
    lane.pending.pop_back();
    throw;
  }
  changed_.notify_all();
  return tickets_.give(direction);
}

// What stands for all that the stream has been given.
cudaEvent_t StreamCopyEngine::record(StreamId stream) {
  const cudaEvent_t event = events_.take();
  if (const cudaError_t error = cudaEventRecord(event, handle_of(stream)); error != cudaSuccess) {
    events_.give_back(event);
    throw CudaError(error, "recording what the compute stream has been given");
  }
  return event;
}

// What was released of `target`; nothing, if no release holds all of it. The bytes get a new user,
// about whom no release says anything.
std::vector<cudaEvent_t> StreamCopyEngine::take_releases(Bytes target) {
  const bool released =
      std::any_of(releases_.begin(), releases_.end(),
                  [&](const Release& release) { return contains(release.slot, target); });
  std::vector<cudaEvent_t> events;
  events.reserve(releases_.size());
  std::erase_if(releases_, [&](const Release& release) {
    if (!touch(release.slot, target))
      return false;
    if (released) {
      events.push_back(release.event);
    } else {
      events_.give_back(release.event);
    }
    return true;
  });
  return events;
}

const StreamCopyEngine::Copy* StreamCopyEngine::conflict(const Copy& copy, std::size_t direction) {
  const Lane& other = lanes_[1 - direction];
  const auto last =
      std::find_if(other.pending.rbegin(), other.pending.rend(), [&](const Copy& earlier) {
        const bool failed = earlier.enqueued && earlier.event == nullptr;
        return !failed && earlier.order < copy.order &&
               (touch(earlier.request.source, copy.request.target) ||
                touch(earlier.request.target, copy.request.source));
      });
  return last == other.pending.rend() ? nullptr : &*last;
}

// In the order of the lane. Throws, with nothing under way, what CUDA refuses.
void StreamCopyEngine::enqueue(Copy& copy, std::size_t direction) {
  Lane& lane = lanes_[direction];
  const CopyRequest& request = copy.request;
  copy.event = events_.take();
  cudaError_t error = cudaSuccess;
  for (const cudaEvent_t event : copy.behind) {
    if (error == cudaSuccess)
      error = cudaStreamWaitEvent(lane.stream, event, 0);
  }
  // The last one that touches the same bytes is behind the others of its stream.
  if (const Copy* const other = conflict(copy, direction);
      error == cudaSuccess && other != nullptr) {
    error = cudaStreamWaitEvent(lane.stream, other->event, 0);
  }
  if (error == cudaSuccess && !request.source.empty()) {
    error = cudaMemcpyAsync(
        request.target.data(), request.source.data(), request.source.size(),
        direction == kToDevice ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, lane.stream);
  }
  if (error == cudaSuccess)
    error = cudaEventRecord(copy.event, lane.stream);
  if (error != cudaSuccess) {
    // Should the copy be under way all the same, it must not outlive its buffers.
    static_cast<void>(cudaStreamSynchronize(lane.stream));
    throw CudaError(error, name_of(request));
  }
  for (const cudaEvent_t event : std::exchange(copy.behind, {}))
    events_.give_back(event);
  copy.enqueued = true;
  ++lane.num_enqueued;
}

void StreamCopyEngine::forget_events(Copy& copy) noexcept {
  for (const cudaEvent_t event : std::exchange(copy.behind, {}))
    events_.give_back(event);
  if (const cudaEvent_t event = std::exchange(copy.event, nullptr))
    events_.give_back(event);
}

// Enqueues what submit() could not: behind a source that is still written, or behind such a copy.
// Goes on until there is nothing left, so that destruction completes what was submitted.
void StreamCopyEngine::work(const std::stop_token& stop, std::size_t direction) {
  static_cast<void>(cudaSetDevice(device_));  // of this thread, which has no other use
  Lane& lane = lanes_[direction];
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [&] { return lane.num_enqueued < num_submitted(direction); })) {
    // Those before it are enqueued, so it stays pending, and where it is.
    Copy& copy = lane.pending[lane.num_enqueued - tickets_.num_done(direction)];
    const std::uint64_t number = lane.num_enqueued + 1;
    std::exception_ptr failure;
    try {
      if (copy.request.await_source) {
        lock.unlock();
        copy.request.await_source();
        lock.lock();
      }
      // Earlier copies alone are waited for, so that the two lanes cannot wait for each other.
      changed_.wait(lock, [&] {
        const Copy* const other = conflict(copy, direction);
        return other == nullptr || other->enqueued;
      });
      enqueue(copy, direction);
    } catch (...) {
      if (!lock.owns_lock())
        lock.lock();
      forget_events(copy);
      copy.enqueued = true;
      ++lane.num_enqueued;
      tickets_.fail({.direction = direction, .number = number}, std::current_exception());
    }
    copy.request.await_source = nullptr;
    changed_.notify_all();
  }
}

void StreamCopyEngine::reap(std::size_t direction) {
  Lane& lane = lanes_[direction];
  while (!lane.pending.empty() && lane.pending.front().enqueued) {
    Copy& copy = lane.pending.front();
    const cudaError_t state = copy.event == nullptr ? cudaSuccess : cudaEventQuery(copy.event);
    if (state == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // or it would be the next caller's "last error"
      return;
    }
    if (state != cudaSuccess)
      throw CudaError(state, name_of(copy.request));
    forget_events(copy);
    lane.pending.pop_front();
    tickets_.complete(direction);
  }
}

const StreamCopyEngine::Copy* StreamCopyEngine::find(CopyNumber copy) {
  reap(copy.direction);
  tickets_.rethrow(copy);
  return tickets_.done(copy)
             ? nullptr
             : &lanes_[copy.direction].pending[copy.number - tickets_.num_done(copy.direction) - 1];
}

const StreamCopyEngine::Copy* StreamCopyEngine::find_enqueued(CopyNumber copy,
                                                              std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return lanes_[copy.direction].num_enqueued >= copy.number; });
  return find(copy);
}

void StreamCopyEngine::order(CopyTicket ticket, StreamId stream) {
  const ScopedDevice current(device_);
  std::unique_lock lock(mutex_);
  if (const Copy* copy = find_enqueued(tickets_.find(ticket), lock)) {
    check(cudaStreamWaitEvent(handle_of(stream), copy->event, 0),
          "making the compute stream wait for a copy");
  }
}

void StreamCopyEngine::wait(CopyTicket ticket) {
  const ScopedDevice current(device_);
  std::unique_lock lock(mutex_);
  const Copy* const copy = find_enqueued(tickets_.find(ticket), lock);
  if (copy == nullptr)
    return;
  // Unlocked while it waits. If somebody reaps the copy and its event is recorded again, the wait
  // is for something later: too long, never too short.
  const cudaEvent_t event = copy->event;
  const std::string name = name_of(copy->request);
  lock.unlock();
  if (const cudaError_t error = cudaEventSynchronize(event); error != cudaSuccess)
    throw CudaError(error, name);
}

void StreamCopyEngine::synchronize_readers(Bytes source) {
  const ScopedDevice current(device_);
  std::unique_lock lock(mutex_);
  reap(kToDevice);
  Lane& lane = lanes_[kToDevice];
  // Copies of a lane are over in order: the last reader stands for all.
  const auto last = std::find_if(lane.pending.rbegin(), lane.pending.rend(), [&](const Copy& copy) {
    return copy.enqueued && copy.event != nullptr && touch(copy.request.source, source);
  });
  if (last == lane.pending.rend())
    return;
  const cudaEvent_t event = last->event;  // as in wait()
  const std::string name = name_of(last->request);
  lock.unlock();
  if (const cudaError_t error = cudaEventSynchronize(event); error != cudaSuccess)
    throw CudaError(error, name);
}

bool StreamCopyEngine::done(CopyTicket ticket) {
  const std::lock_guard lock(mutex_);
  const ScopedDevice current(device_);
  const CopyNumber copy = tickets_.find(ticket);
  return tickets_.failed(copy) || find(copy) == nullptr;
}

void StreamCopyEngine::release(Bytes slot, StreamId stream) {
  const std::lock_guard lock(mutex_);
  const ScopedDevice current(device_);
  releases_.reserve(releases_.size() + 1);
  releases_.push_back({slot, record(stream)});
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
