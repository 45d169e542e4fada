#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace castor::cuda {

/// Pool of CUDA events, kept for reuse. Whoever uses the pool owns and guards it, and calls it with
/// the device current that the events belong to.
class EventPool {
 public:
  /// Whether the device writes down when it comes to an event, for which it takes longer.
  enum class Timing : std::uint8_t { kOff, kOn };

  explicit EventPool(Timing timing = Timing::kOff) noexcept : timing_(timing) {}
  ~EventPool() { clear(); }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  /// Returns an event that is not in use. Throws CudaError.
  [[nodiscard]] cudaEvent_t take();
  /// Takes an event back. Streams may still wait for it: they wait for what it stood for when they
  /// were told to.
  void give_back(cudaEvent_t event) noexcept { free_.push_back(event); }

  /// Destroys all events, those taken included.
  void clear() noexcept;

 private:
  const Timing timing_;
  std::vector<cudaEvent_t> all_;
  std::vector<cudaEvent_t> free_;  // capacity: that of all_, so that give_back never grows it
};

}  // namespace castor::cuda
