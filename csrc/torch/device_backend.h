#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "core/copy_engine.h"
#include "core/memory_tier.h"
#include "optim/gradient.h"
#include "optim/update_rule.h"

namespace castor {

/// Who pays for what torch's allocator hands out of the device. Implemented by the session, called
/// by the backend. Thread-safe.
class DeviceAccount {
 public:
  virtual ~DeviceAccount() = default;
  /// Before an allocation, without any lock of the allocator: evicts until the budget has room for
  /// it. Throws TorchError (castor.OutOfMemoryError) when it cannot.
  virtual void make_room(std::size_t bytes) = 0;
  /// The device has no room for what the budget has: evicts that much. Whether any came free.
  [[nodiscard]] virtual bool evict_refused(std::size_t bytes) = 0;
  /// Torch's tensors took, or gave back, that much; slots and payloads of castor do not count. May
  /// be called under the allocator's lock.
  virtual void allocated(std::size_t bytes) noexcept = 0;
  virtual void freed(std::size_t bytes) noexcept = 0;
};

/// This thread's choice of a stream, until it goes, on the thread that made it.
class StreamScope {
 public:
  StreamScope() = default;
  virtual ~StreamScope() = default;
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;
};

/// What a stream had been given when it was made. Thread-safe.
class ComputeFence {
 public:
  virtual ~ComputeFence() = default;
  /// Returns when the device has done it: the host sees what it wrote.
  virtual void wait() = 0;
};

/// A device that computes by itself: what a session does otherwise there than on the CPU device.
/// castor._cuda implements it for a GPU and hands it to castor._C as a capsule; between the two
/// modules go virtual calls only, so that castor._C names no CUDA library.
///
/// What it does is ordered by streams, which the caller names (docs/design/0021): mostly the
/// session's ComputeStream. Homes are memory that the device reads and writes at its host address;
/// so a tensor of device() over a home is slow, not wrong. Each backend serves one session, which
/// owns it together with the arenas' users; its functions may be called from any thread. All throw
/// Error.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// Of the parameters, gradients and activations.
  [[nodiscard]] virtual c10::Device device() const noexcept = 0;

  /// What torch's operators, called by this thread now, run on. Throws UsageError while that is
  /// recorded into a graph, which would replay the addresses of this step.
  [[nodiscard]] virtual StreamId current_stream() = 0;
  /// As ComputeStream::Order.
  virtual void order(StreamId first, StreamId then) = 0;
  /// While it lives, torch's operators that this thread calls run on `stream`.
  [[nodiscard]] virtual std::unique_ptr<StreamScope> run_on(StreamId stream) = 0;

  /// Called once.
  [[nodiscard]] virtual std::unique_ptr<CopyEngine> make_copy_engine() = 0;
  /// Slots and payloads, ordered by the streams they are used on; may outlive the backend.
  [[nodiscard]] virtual std::unique_ptr<Arena> make_device_arena() = 0;
  /// Homes, in memory that the device addresses; may outlive the backend.
  [[nodiscard]] virtual std::unique_ptr<Arena> make_host_arena() = 0;
  /// From now on torch's allocations on the device are the account's, which is told of those that
  /// are there already; until it is gone.
  virtual void follow(const std::shared_ptr<DeviceAccount>& account) = 0;
  /// What such an allocation of `bytes` counts there.
  [[nodiscard]] virtual std::size_t allocated_for(std::size_t bytes) const noexcept {
    return bytes;
  }

  /// Whether update() knows the rule of that name (UpdateRule::name).
  [[nodiscard]] virtual bool has_kernels(std::string_view rule) const noexcept = 0;
  /// Gives `stream` one step of each segment, all of the device. The bits are those of
  /// UpdateRule::update, so that a chunk may change sides between steps.
  virtual void update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
                      StreamId stream) = 0;
  /// sums[i] = sum of squares of segments[i], with the bits of copy_and_square_norm; all are
  /// memory of the device, behind what `stream` has been given. Waits for the sums. May allocate,
  /// and so evict: the segments are held.
  virtual void square_norms(std::span<const NormSegment> segments, std::span<double> sums,
                            StreamId stream) = 0;

  [[nodiscard]] virtual std::unique_ptr<ComputeFence> fence(StreamId stream) = 0;
  /// Before the host writes these bytes, or gives them back: returns when no copy in reads them any
  /// more. Copies that wait for their source (CopyRequest::await_source) read it afterwards.
  virtual void host_writes(std::span<const std::byte> home) = 0;
};

/// What the capsule is called that carries a std::shared_ptr<DeviceBackend>. Both modules come from
/// one build: the name changes with the interface.
inline constexpr const char* kDeviceBackendCapsule = "castor.DeviceBackend.4";

}  // namespace castor
