#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <memory>

#include "device_memory.h"

namespace castor::simulated {

/// Of the simulated GPU of the process: 4 GiB.
[[nodiscard]] DeviceMemory& device_memory();

/// The calling thread's current stream, as torch and as the simulated GPU name it.
[[nodiscard]] c10::Stream current_stream();
[[nodiscard]] std::shared_ptr<Stream> current_queue();
/// Returns the one before.
c10::Stream exchange_stream(c10::Stream stream);
[[nodiscard]] c10::Stream torch_stream(std::uint64_t id);
[[nodiscard]] std::shared_ptr<Stream> queue_of(const c10::Stream& stream);

/// Refuses the n-th request from now on and the next ones, `times` in all, whatever room there is;
/// n = 0: none. Thread-safe.
class Refusals {
 public:
  void refuse(std::size_t n, std::size_t times = 1) {
    seen_ = 0;
    first_ = n;
    end_ = n == 0 ? 0 : n + times;
  }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] bool now() {
    const std::size_t request = ++seen_;
    const bool refused = first_ <= request && request < end_;
    count_ += refused ? 1 : 0;
    return refused;
  }

 private:
  std::atomic<std::size_t> seen_{0};
  std::atomic<std::size_t> first_{0};
  std::atomic<std::size_t> end_{0};
  std::atomic<std::size_t> count_{0};
};

struct AllocatorRefusals {
  Refusals tensors;  ///< what torch asks for a tensor
  Refusals blocks;   ///< what is asked for with a stream: castor's slots and payloads
  Refusals pages;    ///< what is registered with the CUDA runtime
};
[[nodiscard]] AllocatorRefusals& refusals();

/// What the device has been given since the process began.
struct Counts {
  std::atomic<std::size_t> update_numel{0};
  std::atomic<std::size_t> update_calls{0};
  std::atomic<std::size_t> norm_numel{0};
  std::atomic<std::size_t> norm_launches{0};
  std::atomic<std::size_t> copies_in{0};
  std::atomic<std::size_t> copies_out{0};
  std::atomic<std::size_t> bytes_in{0};  // by these, and by torch's copies between host and device
  std::atomic<std::size_t> bytes_out{0};
  std::atomic<std::size_t> host_waits{0};   ///< calls in which the host waits for a stream
  std::atomic<std::size_t> fences{0};       ///< moments of a stream that the host has waited for
  std::atomic<std::size_t> collectives{0};  ///< of simnccl; messages are counted as well
  std::atomic<std::size_t> collective_bytes{0};  ///< what this rank has handed over in those
  std::atomic<std::size_t> registrations{0};     ///< of host memory
};
[[nodiscard]] Counts& counts();

/// torch's record_stream: no effect on memory that is not the caching allocator's.
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);

/// Registers streams, events and host memory with torch. Once.
void add_device_to_torch();
/// The operators. Once.
void add_operators_to_torch();

/// Throws RuntimeError with the sticky error of the device, if there is one.
void check_device();

}  // namespace castor::simulated
