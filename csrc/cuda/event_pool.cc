#include "cuda/event_pool.h"

#include <algorithm>

#include "cuda/cuda_error.h"

namespace castor::cuda {
namespace {

constexpr std::size_t kFirstEvents = 16;  // events that there is room for from the first one on

}  // namespace

void EventPool::clear() noexcept {
  for (const cudaEvent_t event : all_)
    static_cast<void>(cudaEventDestroy(event));
  all_.clear();
  free_.clear();
}

cudaEvent_t EventPool::take() {
  if (free_.empty()) {
    if (all_.size() == all_.capacity()) {
      all_.reserve(std::max(kFirstEvents, 2 * all_.size()));
    }
    free_.reserve(all_.capacity());
    cudaEvent_t event = nullptr;
    const unsigned flags = timing_ == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming;
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreate");
    all_.push_back(event);
    return event;
  }
  const cudaEvent_t event = free_.back();
  free_.pop_back();
  return event;
}

}  // namespace castor::cuda
