#pragma once

#include <cuda_runtime_api.h>

#include <vector>

namespace castor::cuda {

/// CUDA events without timing, kept for reuse. Owned, and guarded, by whoever uses it, with the
/// device current that the events belong to.
class EventPool {
 public:
  EventPool() = default;
  ~EventPool() { clear(); }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  /// Throws CudaError.
  [[nodiscard]] cudaEvent_t take();
  /// An event may come back while streams still wait for it: what they wait for is what it stood
  /// for when they were told to.
  void give_back(cudaEvent_t event) noexcept { free_.push_back(event); }

  /// Destroys all of them, those taken included.
  void clear() noexcept;

 private:
  std::vector<cudaEvent_t> all_;
  std::vector<cudaEvent_t> free_;  // capacity: that of all_, so that give_back never grows it
};

}  // namespace castor::cuda
