#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <span>

#include "core/chunk_manager.h"
#include "core/compute_stream.h"
#include "core/nonmodel_memory.h"
#include "torch/device_backend.h"

namespace castor {

/// What a device's allocator does for torch, as non-model memory.
[[nodiscard]] std::shared_ptr<DeviceAccount> account_of(std::shared_ptr<NonModelMemory> memory,
                                                        std::shared_ptr<DeviceBackend> backend);

/// The device of one session: its backend, and the order in which the session uses it. Owned by the
/// session; functions may be called from any thread, and throw as the backend's.
class SessionDevice {
 public:
  explicit SessionDevice(std::shared_ptr<DeviceBackend> backend);

  [[nodiscard]] DeviceBackend& backend() const noexcept { return *backend_; }
  [[nodiscard]] c10::Device torch_device() const noexcept { return backend_->device(); }
  /// As DeviceBackend's.
  [[nodiscard]] bool computes_by_itself() const noexcept { return backend_->computes_by_itself(); }
  /// Requires computes_by_itself().
  [[nodiscard]] DeviceKernels& kernels() const noexcept { return *backend_->kernels(); }

  /// What orders the session's device memory.
  [[nodiscard]] const std::shared_ptr<ComputeStream>& stream() const noexcept { return stream_; }
  /// The model runs on this thread's current stream from now on: a module event, a step, or
  /// somebody who reads what the device wrote.
  void follow_stream() const { stream_->move_to(backend_->current_stream()); }
  /// Of this thread.
  [[nodiscard]] StreamId current_stream() const { return backend_->current_stream(); }
  /// As DeviceBackend::run_on, of stream().
  [[nodiscard]] std::shared_ptr<void> run_on_stream() const {
    return backend_->run_on(stream_->id());
  }
  /// Returns when the host sees what the device has been given to write so far, by this thread too.
  void await() const;
  /// Of stream().
  [[nodiscard]] std::unique_ptr<ComputeFence> fence() const {
    return backend_->fence(stream_->id());
  }
  /// As DeviceBackend's.
  void host_writes(std::span<const std::byte> home) const { backend_->host_writes(home); }
  /// Homes go to the tensors that are left, and with the last of these to their arena: returns when
  /// no copy reads them.
  void leave(std::span<const std::shared_ptr<Payload>> homes) const noexcept;
  /// Whether the chunk's payloads lie in memory of a device that works on them itself: what it is
  /// given to do is behind what it has been given before, by the calling thread.
  [[nodiscard]] bool holds(const ChunkManager& chunks, ChunkId chunk) const {
    return computes_by_itself() &&
           chunks.payload(chunk, PayloadKind::kParam)->tier() == TierKind::kDevice;
  }

 private:
  const std::shared_ptr<DeviceBackend> backend_;
  const std::shared_ptr<ComputeStream> stream_;
};

}  // namespace castor
