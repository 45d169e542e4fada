#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace castor::testing {

/// The CUDA runtime, as far as csrc/cuda's plain C++ calls it, simulated: linked in place of
/// libcudart. Streams are queues that nothing runs by itself: a test runs them in an order of its
/// choice, the worst included, and sees whether events keep the work in order. A host wait
/// (cudaStreamSynchronize, cudaEventSynchronize) runs what it needs, latest streams first.
///
/// Thread-safe. One instance at a time; it makes the functions work.
class FakeCuda {
 public:
  FakeCuda();
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  [[nodiscard]] cudaStream_t new_stream();
  /// Work of a kernel, which takes that long by the device's clock.
  void enqueue(cudaStream_t stream, std::function<void()> kernel, std::uint64_t takes_ns = 0);
  /// Time goes by on the host. The device begins no work before it is given.
  void host_takes(std::uint64_t nanoseconds);
  /// Memory that copies take for that of `device`, or for page-locked memory.
  void add_device_memory(std::span<const std::byte> range, int device);
  void add_pinned_memory(std::span<const std::byte> range);

  /// Runs the next item of a stream; false if it is empty, or waits for an event.
  bool step(cudaStream_t stream);
  /// Runs all there is.
  void run_all();
  [[nodiscard]] std::vector<cudaStream_t> streams() const;
  [[nodiscard]] std::size_t num_queued(cudaStream_t stream) const;

  /// The n-th call (the first is 1) of a function from now on gives `error`.
  void fail_call(const std::string& function, std::size_t n, cudaError_t error);
  /// From now on what the device has to report is `error`, as after a kernel's illegal address.
  void break_device(cudaError_t error);

  [[nodiscard]] std::size_t num_live_streams() const;
  [[nodiscard]] std::size_t num_live_events() const;
  [[nodiscard]] std::size_t num_calls(const std::string& function) const;
  /// What is registered now, with the size that was registered.
  [[nodiscard]] std::size_t num_registrations() const;
  [[nodiscard]] std::size_t registered_bytes() const;
  [[nodiscard]] unsigned last_register_flags() const;
};

}  // namespace castor::testing
