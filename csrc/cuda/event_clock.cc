#include "cuda/event_clock.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cuda/cuda_error.h"
#include "cuda/scoped_device.h"
#include "cuda/stream_order.h"

namespace castor::cuda {
namespace {

constexpr std::size_t kUnread = 256;  // marks that may be unread before new ones look at them
constexpr int kReadsPerMark = 2;      // so that those that have gathered become fewer

}  // namespace

void EventClock::mark(StreamId stream) {
  const ScopedDevice current(device_);
  for (int i = 0; i < kReadsPerMark && marks_.size() - times_ns_.size() >= kUnread; ++i) {
    if (!read_next()) {
      break;
    }
  }
  marks_.push_back(nullptr);
  try {
    marks_.back() = events_.take();
    check(cudaEventRecord(marks_.back(), handle_of(stream)), "marking the compute stream");
  } catch (...) {
    if (marks_.back() != nullptr) {
      events_.give_back(marks_.back());
    }
    marks_.pop_back();
    throw;
  }
}

bool EventClock::passed() {
  const ScopedDevice current(device_);
  while (times_ns_.size() < marks_.size()) {
    if (!read_next()) {
      return false;
    }
  }
  return true;
}

bool EventClock::read_next() {
  const std::size_t next = times_ns_.size();
  const cudaError_t state = cudaEventQuery(marks_[next]);
  if (state == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // or it would be the next caller's "last error"
    return false;
  }
  check(state, "the work that the compute stream was given");
  if (next == 0) {
    times_ns_.push_back(0);
    return true;
  }
  // From mark to mark: CUDA tells milliseconds as a float, whose steps grow with the time.
  float milliseconds = 0.0F;
  check(cudaEventElapsedTime(&milliseconds, marks_[next - 1], marks_[next]),
        "cudaEventElapsedTime");
  const double nanoseconds = std::max(0.0, 1e6 * static_cast<double>(milliseconds));
  times_ns_.push_back(times_ns_.back() + static_cast<std::uint64_t>(std::llround(nanoseconds)));
  events_.give_back(std::exchange(marks_[next - 1], nullptr));
  return true;
}

void EventClock::forget() noexcept {
  for (const cudaEvent_t event : marks_) {
    if (event != nullptr) {
      events_.give_back(event);
    }
  }
  marks_.clear();
  times_ns_.clear();
}

}  // namespace castor::cuda
