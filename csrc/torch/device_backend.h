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

/// What a stream had been given when it was made. Thread-safe.
class ComputeFence {
 public:
  virtual ~ComputeFence() = default;
  /// Returns when the device has done it: the host sees what it wrote.
  virtual void wait() {}
};

/// What castor computes on a device that has memory of its own. Thread-safe; throws Error.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  /// Whether update() knows the rule of that name (UpdateRule::name).
  [[nodiscard]] virtual bool has(std::string_view rule) const noexcept = 0;
  /// Gives `stream` one step of each segment, all of the device. The bits are those of
  /// UpdateRule::update, so that a chunk may change sides between steps.
  virtual void update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
                      StreamId stream) = 0;
  /// sums[i] = sum of squares of segments[i], with the bits of copy_and_square_norm; all are
  /// memory of the device, behind what `stream` has been given. Waits for the sums. May allocate,
  /// and so evict: the segments are held.
  virtual void square_norms(std::span<const NormSegment> segments, std::span<double> sums,
                            StreamId stream) = 0;
};

/// Where a session's model computes: the CPU device (cpu_backend.h), or a GPU. castor._cuda
/// implements that and hands it to castor._C as a capsule (python/backend_capsule.h); between the
/// two modules go virtual calls only, so that castor._C names no CUDA library.
///
/// What it does is ordered by streams, which the caller names (docs/design/0021): mostly the
/// session's ComputeStream. What is implemented here is right where there is one stream, the thread
/// that calls, whose work is done on return. Homes are memory that the device reads and writes at
/// its host address; so a tensor of device() over a home is slow, not wrong. Each backend serves
/// one session, which owns it together with the arenas' users; its functions may be called from any
/// thread. All throw Error.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// Of the parameters, gradients and activations.
  [[nodiscard]] virtual c10::Device device() const noexcept = 0;
  /// nullptr: the device's memory is the host's, which works there itself.
  [[nodiscard]] virtual DeviceKernels* kernels() noexcept = 0;
  /// Whether the device works beside the host, in memory of its own. What is freed there is lent
  /// out again at once.
  [[nodiscard]] bool computes_by_itself() noexcept { return kernels() != nullptr; }

  /// What torch's operators, called by this thread now, run on. Throws UsageError while that is
  /// recorded into a graph, which would replay the addresses of this step.
  [[nodiscard]] virtual StreamId current_stream() { return {}; }
  /// As ComputeStream::Order.
  virtual void order(StreamId /*first*/, StreamId /*then*/) {}
  /// While it lives, torch's operators that this thread calls run on `stream`. Goes on this thread.
  [[nodiscard]] virtual std::shared_ptr<void> run_on(StreamId /*stream*/) { return nullptr; }

  /// Called once.
  [[nodiscard]] virtual std::unique_ptr<CopyEngine> make_copy_engine() = 0;
  /// Slots and payloads, ordered by the streams they are used on; may outlive the backend.
  [[nodiscard]] virtual std::unique_ptr<Arena> make_device_arena() = 0;
  /// Homes, in memory that the device addresses; may outlive the backend.
  [[nodiscard]] virtual std::unique_ptr<Arena> make_host_arena() = 0;
  /// From now on torch's allocations on the device are the account's, which is told of those that
  /// are there already; until it is gone. Of the CPU device those that Passes names one for.
  virtual void follow(const std::shared_ptr<DeviceAccount>& account) = 0;
  /// What such an allocation of `bytes` counts there.
  [[nodiscard]] virtual std::size_t allocated_for(std::size_t bytes) const noexcept {
    return bytes;
  }
  /// Somebody else pays for torch's live allocation at `data` from now on: it counts no longer.
  /// False, and nothing happened, where the account will hear of its end all the same.
  [[nodiscard]] virtual bool stop_counting(void* /*data*/) noexcept { return false; }

  [[nodiscard]] virtual std::unique_ptr<ComputeFence> fence(StreamId /*stream*/) {
    return std::make_unique<ComputeFence>();
  }
  /// Before the host writes these bytes, or gives them back: returns when no copy in reads them any
  /// more. Copies that wait for their source (CopyRequest::await_source) read it afterwards.
  virtual void host_writes(std::span<const std::byte> /*home*/) {}
};

}  // namespace castor
