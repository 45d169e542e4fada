#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/chunk_layout.h"
#include "core/copy_engine.h"
#include "core/executor.h"
#include "core/memory_tier.h"
#include "core/mutex.h"
#include "optim/update_rule.h"
#include "store/optimizer_state_options.h"
#include "store/session_device.h"

namespace castor {

/// Updates of chunks in host memory, a share of which the device runs beside the host: weights,
/// gradients and states cross the link piece by piece into a ring of device memory, a kernel
/// updates them there, and weights and states come back. The bits are those of the host's update,
/// whatever the share is (DeviceKernels::update). Twin-Flow (ZeRO-Offload++, DeepSpeed 2023) shares
/// updates in the same way, by whole parameters and with states that stay on the device.
///
/// The ring is taken from the device's budget for good. The pieces have a stream and a copy engine
/// of their own: neither the model's kernels nor the copies of chunks wait for them. Owned by the
/// session. Thread-safe; one update at a time has the ring, others wait for it.
class DeviceUpdates {
 public:
  static constexpr std::size_t kSlots = 3;
  /// Bytes of a slot of the ring, unless the largest chunk needs less: long enough that a copy of
  /// each array reaches the link's bandwidth.
  static constexpr std::size_t kSlotBytes = std::size_t{16} << 20;

  /// Allocates the ring for the chunks of `layout`. Throws OutOfMemory; UsageError where the device
  /// has no kernel for the rule. `device` and `memory` outlive this.
  DeviceUpdates(const ChunkLayout& layout, const UpdateRule& rule, const SessionDevice& device,
                MemoryTier& memory, DeviceShare share);
  /// Waits for the copies in flight.
  ~DeviceUpdates();
  DeviceUpdates(const DeviceUpdates&) = delete;
  DeviceUpdates& operator=(const DeviceUpdates&) = delete;

  /// Runs one step of each segment, whose arrays are in host memory, as UpdateRule::update. What it
  /// throws leaves no copy under way, and the segments in part updated.
  void update(const UpdateRule& rule, Executor& executor, std::span<const UpdateSegment> segments);

  /// Returns the fraction of the elements that the next update gives the device.
  [[nodiscard]] double fraction() const noexcept { return fraction_.load(); }
  /// Returns the elements that the device has updated so far.
  [[nodiscard]] std::uint64_t updated_elements() const noexcept { return updated_.load(); }
  /// Returns the bytes of the ring.
  [[nodiscard]] std::size_t bytes() const noexcept { return ring_.bytes(); }

  /// Returns the bytes of the ring for such chunks.
  [[nodiscard]] static std::size_t ring_bytes(const ChunkLayout& layout, const UpdateRule& rule);

 private:
  class Filling;
  struct Times;

  void run_on_device(const UpdateRule& rule, std::span<const UpdateSegment> segments)
      CASTOR_REQUIRES(mutex_);
  void abandon() noexcept CASTOR_REQUIRES(mutex_);
  void adapt(const Times& times) CASTOR_REQUIRES(mutex_);

  const SessionDevice& device_;
  const bool adapts_;
  const std::unique_ptr<DeviceLane> lane_;
  const Block ring_;
  Mutex mutex_;                                               // held while an update has the ring
  std::vector<CopyTicket> copies_ CASTOR_GUARDED_BY(mutex_);  // of the update that has the ring
  std::array<CopyTicket, kSlots> last_out_ CASTOR_GUARDED_BY(mutex_) = {};  // of each slot
  std::size_t slot_ CASTOR_GUARDED_BY(mutex_) = 0;   // the last one that was filled
  bool overshot_ CASTOR_GUARDED_BY(mutex_) = false;  // the device once took longer than the host
  std::atomic<double> fraction_;
  std::atomic<std::uint64_t> updated_ = 0;
};

}  // namespace castor
