#pragma once

#include <memory>
#include <span>

#include "core/chunk_manager.h"
#include "core/compute_stream.h"
#include "store/device_backend.h"

namespace castor {

/// Device of one session: its backend, and the order in which the session uses it. Owned by the
/// session. Its functions may be called from any thread, and throw as the backend's.
class SessionDevice {
 public:
  explicit SessionDevice(std::shared_ptr<DeviceBackend> backend);

  [[nodiscard]] DeviceBackend& backend() const noexcept { return *backend_; }
  [[nodiscard]] DeviceId id() const noexcept { return backend_->device(); }
  /// Same as DeviceBackend::computes_by_itself.
  [[nodiscard]] bool computes_by_itself() const noexcept { return backend_->computes_by_itself(); }
  /// Requires computes_by_itself().
  [[nodiscard]] DeviceKernels& kernels() const noexcept { return *backend_->kernels(); }

  /// Returns the compute stream, which orders the session's device memory.
  [[nodiscard]] const std::shared_ptr<ComputeStream>& stream() const noexcept { return stream_; }
  /// Moves stream() to this thread's current stream, on which the model runs from now on. Called at
  /// a module event, at a step, and by whoever reads what the device wrote.
  void follow_stream() const { stream_->move_to(backend_->current_stream()); }
  /// Returns this thread's current stream.
  [[nodiscard]] StreamId current_stream() const { return backend_->current_stream(); }
  /// Same as DeviceBackend::run_on, for stream().
  [[nodiscard]] std::shared_ptr<void> run_on_stream() const {
    return backend_->run_on(stream_->id());
  }
  /// Waits until the host sees all that the device has been given to write so far, also by this
  /// thread.
  void await() const;
  /// Returns a fence behind all that stream() has been given.
  [[nodiscard]] std::unique_ptr<ComputeFence> fence() const {
    return backend_->fence(stream_->id());
  }
  /// Same as DeviceBackend::host_writes.
  void host_writes(std::span<const std::byte> host) const { backend_->host_writes(host); }
  /// Waits until no copy reads the storage of these payloads. To be called before that storage goes
  /// to the tensors that are left, and with the last of these back to its arena.
  void leave(std::span<const std::shared_ptr<Payload>> host_payloads) const noexcept;
  /// Returns whether the chunk's payloads lie in memory of a device that works on them itself. Work
  /// that the calling thread gives that device is behind all that it has given the device before.
  [[nodiscard]] bool holds(const ChunkManager& chunks, ChunkId chunk) const {
    return computes_by_itself() &&
           chunks.payload(chunk, PayloadKind::kParam)->tier() == TierKind::kDevice;
  }

 private:
  const std::shared_ptr<DeviceBackend> backend_;
  const std::shared_ptr<ComputeStream> stream_;
};

}  // namespace castor
