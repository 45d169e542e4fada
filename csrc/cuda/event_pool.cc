#include "cuda/event_pool.h"

#include "cuda/cuda_error.h"

namespace castor::cuda {

void EventPool::clear() noexcept {
  for (const cudaEvent_t event : all_)
    static_cast<void>(cudaEventDestroy(event));
  all_.clear();
  free_.clear();
}

cudaEvent_t EventPool::take() {
  if (free_.empty()) {
    all_.reserve(all_.size() + 1);
    free_.reserve(all_.capacity());
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    all_.push_back(event);
    return event;
  }
  const cudaEvent_t event = free_.back();
  free_.pop_back();
  return event;
}

}  // namespace castor::cuda
