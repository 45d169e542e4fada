#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/copy_engine.h"
#include "core/device_clock.h"
#include "core/io_engine.h"
#include "core/memory_tier.h"
#include "core/scalar_type.h"
#include "optim/gradient.h"
#include "optim/update_rule.h"

namespace castor {

/// Account that pays for the device memory that torch's allocator hands out. Implemented by the
/// session, called by the backend. Thread-safe.
class DeviceAccount {
 public:
  virtual ~DeviceAccount() = default;
  /// Evicts until the budget has room for an allocation. Called before it, without any lock of the
  /// allocator. Throws TorchError (castor.OutOfMemoryError) when there can be no room.
  virtual void make_room(std::size_t bytes) = 0;
  /// Evicts `bytes` where the device has no room for what the budget has room for. Returns whether
  /// any memory came free.
  [[nodiscard]] virtual bool evict_refused(std::size_t bytes) = 0;
  /// Notes that torch's tensors took `bytes`, or with freed() gave them back; castor's slots and
  /// payloads do not count. Both may be called under the allocator's lock.
  virtual void allocated(std::size_t bytes) noexcept = 0;
  virtual void freed(std::size_t bytes) noexcept = 0;
};

/// Mark behind everything that a stream had been given when the fence was made. Thread-safe.
class ComputeFence {
 public:
  virtual ~ComputeFence() = default;
  /// Returns when the device has done that work: the host then sees what the work wrote.
  virtual void wait() {}
};

/// Kernels that castor runs on a device with memory of its own. Thread-safe; throws Error.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  /// Returns whether update() knows the update rule of that name (UpdateRule::name).
  [[nodiscard]] virtual bool has(std::string_view rule) const noexcept = 0;
  /// Gives `stream` one step of each segment, all in device memory. The bits are those of
  /// UpdateRule::update, so that a chunk may change sides between steps.
  virtual void update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
                      StreamId stream) = 0;
  /// Sets sums[i] to the sum of squares of segments[i], with the bits of copy_and_square_norm. The
  /// segments are device memory, read behind what `stream` has been given. Waits for the sums. May
  /// allocate, and so evict: the caller pins the chunks of the segments.
  virtual void square_norms(std::span<const NormSegment> segments, std::span<double> sums,
                            StreamId stream) = 0;
  /// Gives `stream` the mean of `count` gradients of `numel` elements each, which lie one behind
  /// the other from `parts` on, with the bits of castor::average(). `mean` may be `parts`. Takes no
  /// memory.
  virtual void average(void* mean, const void* parts, std::size_t count, std::size_t numel,
                       ScalarType type, StreamId stream) = 0;
};

/// Stream of a device, with copies of its own, for work that the session's compute stream and
/// copies do not wait for. Thread-safe; destruction waits for the copies in flight.
class DeviceLane {
 public:
  virtual ~DeviceLane() = default;
  [[nodiscard]] virtual StreamId stream() const noexcept = 0;
  [[nodiscard]] virtual CopyEngine& copies() noexcept = 0;
};

/// Number of a device, as torch counts devices: c10::DeviceType and c10::DeviceIndex.
struct DeviceId {
  std::int8_t type = 0;
  std::int8_t number = -1;
};

/// Device on which a session's model computes: the CPU device (cpu_backend.h), or a GPU.
/// castor._cuda implements the GPU's backend and hands it to castor._C as a capsule
/// (python/backend_capsule.h). Only virtual calls go between the two modules, so that castor._C
/// names no CUDA library.
///
/// Streams, which the caller names, order the backend's work (docs/design/0021): mostly the
/// session's ComputeStream. The implementations here are right for a device with one stream, the
/// calling thread, whose work is done on return. Host storage is memory that the device reads and
/// writes at its host address, so a tensor of device() over host storage is slow, not wrong.
///
/// Each backend serves one session, which owns it together with the users of the arenas. Any thread
/// may call its functions. All throw Error.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// Returns the device of the parameters, gradients and activations.
  [[nodiscard]] virtual DeviceId device() const noexcept = 0;
  /// Returns the device's kernels. nullptr: the device's memory is the host's, and the host works
  /// there itself.
  [[nodiscard]] virtual DeviceKernels* kernels() noexcept = 0;
  /// Returns whether the device works beside the host, in memory of its own. Memory that is freed
  /// there is handed out again at once.
  [[nodiscard]] bool computes_by_itself() noexcept { return kernels() != nullptr; }

  /// Returns the stream that torch's operators run on when this thread calls them now. Throws
  /// UsageError while that stream is recorded into a graph, which would replay the addresses of
  /// this step.
  [[nodiscard]] virtual StreamId current_stream() { return {}; }
  /// Makes what the second stream is given from now on wait for what the first has been given, as
  /// ComputeStream::Order.
  virtual void order(StreamId /*first*/, StreamId /*then*/) {}
  /// Makes torch's operators that this thread calls run on `stream` while the returned object
  /// lives. The object is destroyed on this thread.
  [[nodiscard]] virtual std::shared_ptr<void> run_on(StreamId /*stream*/) { return nullptr; }

  /// Makes the copy engine. Called once.
  [[nodiscard]] virtual std::unique_ptr<CopyEngine> make_copy_engine() = 0;
  /// Makes a further copy engine, for a thread that updates wait for: its copies never wait behind
  /// those of the first one, of which some wait for an update. Returns nullptr where the host
  /// addresses the device's memory.
  [[nodiscard]] virtual std::unique_ptr<CopyEngine> make_staging_engine() { return nullptr; }
  /// Makes a lane for kernels over memory that its own copies bring. Returns nullptr where the host
  /// addresses the device's memory.
  [[nodiscard]] virtual std::unique_ptr<DeviceLane> make_lane() { return nullptr; }
  /// Makes the arena of slots and payloads, which the streams that use them order. The arena may
  /// outlive the backend.
  [[nodiscard]] virtual std::unique_ptr<Arena> make_device_arena() = 0;
  /// Makes the arena of host storage, in memory that the device addresses. The arena may outlive
  /// the backend.
  [[nodiscard]] virtual std::unique_ptr<Arena> make_host_arena() = 0;
  /// Locks pages of the host, which other processes may have mapped too, for the device's copies
  /// and kernels. They are unlocked when the returned object goes; it may outlive the backend.
  /// nullptr: the device addresses all host memory. Throws Error where the system refuses.
  [[nodiscard]] virtual std::shared_ptr<void> lock_pages(std::span<std::byte> /*pages*/) {
    return nullptr;
  }
  /// Returns the engine by which the session reads and writes NVMe: `host`, which moves bytes
  /// between files and host memory, or one in its place.
  [[nodiscard]] virtual std::unique_ptr<IoEngine> io_engine(std::unique_ptr<IoEngine> host) {
    return host;
  }
  /// Charges torch's allocations on the device to the account from now on, until the account is
  /// gone. Tells it of the allocations that are there already. On the CPU device, charges only
  /// allocations for which Passes names an account.
  virtual void follow(const std::shared_ptr<DeviceAccount>& account) = 0;
  /// Returns the bytes that such an allocation of `bytes` counts on the account.
  [[nodiscard]] virtual std::size_t allocated_for(std::size_t bytes) const noexcept {
    return bytes;
  }
  /// Stops counting torch's live allocation at `data`, which somebody else pays for from now on.
  /// Returns false, and does nothing, where the account will hear of the allocation's end all the
  /// same.
  [[nodiscard]] virtual bool stop_counting(void* /*data*/) noexcept { return false; }

  /// Copy bytes from the device's memory to the host's and back, behind what current_stream() has
  /// been given. The copy is over on return. It takes no memory of the device's allocator, since
  /// the caller may hold the runtime's mutex. For rare copies: users' edits of weights,
  /// checkpoints.
  virtual void copy_from_device(std::span<const std::byte> source, std::byte* target) {
    std::copy(source.begin(), source.end(), target);  // no bytes may have no address
  }
  virtual void copy_to_device(std::span<const std::byte> source, std::byte* target) {
    std::copy(source.begin(), source.end(), target);  // no bytes may have no address
  }

  /// Makes a clock of the device's own. Returns nullptr where the device's work is done when the
  /// host has called it: the host's clock tells all then.
  [[nodiscard]] virtual std::unique_ptr<DeviceClock> make_clock() { return nullptr; }

  [[nodiscard]] virtual std::unique_ptr<ComputeFence> fence(StreamId /*stream*/) {
    return std::make_unique<ComputeFence>();
  }
  /// Returns when no copy to the device reads these bytes any more; called before the host writes
  /// them or gives them back. Copies that wait for their source (CopyRequest::await_source) read it
  /// afterwards.
  virtual void host_writes(std::span<const std::byte> /*host*/) {}
};

}  // namespace castor
