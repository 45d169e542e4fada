#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>

#include "simulated_copies.h"
#include "store/device_backend.h"
#include "torch/torch_device.h"

namespace castor::testing {

/// The blocks of device memory that are alive. Thread-safe; shared with the arena.
class DeviceMemory {
 public:
  void add(const std::byte* data, std::size_t bytes);
  void remove(const std::byte* data);
  [[nodiscard]] bool contains(const void* data, std::size_t bytes) const;
  /// The n-th block from now on is refused with OutOfMemory; 0: none.
  void refuse_block(std::size_t n) { until_refusal_ = n; }
  [[nodiscard]] bool refuses_now();

 private:
  mutable std::mutex mutex_;  // guards blocks_
  std::map<const std::byte*, std::size_t> blocks_;
  std::atomic<std::size_t> until_refusal_{0};
};

/// Of a simulated device, since it was made.
struct DeviceCounts {
  std::atomic<std::size_t> update_numel{0};
  std::atomic<std::size_t> update_calls{0};
  std::atomic<std::size_t> norm_numel{0};
  std::atomic<std::size_t> fences{0};
};

/// A GPU's part in host memory. Its compute stream is the thread that calls: what is given to it is
/// done on return, as torch's CPU operators are, so it is in order with those. Kernels are the
/// bodies that the GPU runs (host_kernels.h). What is asynchronous are the copies
/// (SimulatedCopies). Freed device memory is filled with NaN. A kernel over memory that is not the
/// device's is an error, and so is a host write to storage that a copy may still read.
class SimulatedDevice final : public DeviceBackend, public DeviceKernels {
 public:
  explicit SimulatedDevice(std::uint64_t bytes_per_second);

  [[nodiscard]] DeviceId device() const noexcept override { return device_id(c10::kCPU); }
  [[nodiscard]] DeviceKernels* kernels() noexcept override { return this; }
  [[nodiscard]] std::unique_ptr<CopyEngine> make_copy_engine() override;
  [[nodiscard]] std::unique_ptr<CopyEngine> make_staging_engine() override {
    return std::make_unique<SimulatedCopies>(bytes_per_second_);
  }
  [[nodiscard]] std::unique_ptr<DeviceLane> make_lane() override;
  [[nodiscard]] std::unique_ptr<Arena> make_device_arena() override;
  [[nodiscard]] std::unique_ptr<Arena> make_host_arena() override;
  void follow(const std::shared_ptr<DeviceAccount>& account) override;
  [[nodiscard]] bool has(std::string_view rule) const noexcept override;
  void update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
              StreamId stream) override;
  void square_norms(std::span<const NormSegment> segments, std::span<double> sums,
                    StreamId stream) override;
  void average(void* mean, const void* parts, std::size_t count, std::size_t numel, ScalarType type,
               StreamId stream) override;
  [[nodiscard]] std::unique_ptr<ComputeFence> fence(StreamId stream) override;
  void host_writes(std::span<const std::byte> host) override;

  [[nodiscard]] const DeviceCounts& counts() const noexcept { return counts_; }
  [[nodiscard]] const SimulatedCopies* copies() const noexcept { return copies_; }
  [[nodiscard]] DeviceMemory& memory() noexcept { return *memory_; }

 private:
  void check(const void* data, std::size_t bytes, std::string_view what) const;

  const std::uint64_t bytes_per_second_;
  const std::shared_ptr<DeviceMemory> memory_;
  SimulatedCopies* copies_ = nullptr;  // the session's, which outlives its use of this
  DeviceCounts counts_;
};

}  // namespace castor::testing
