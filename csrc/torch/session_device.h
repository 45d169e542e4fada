#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <span>
#include <utility>

#include "core/chunk_manager.h"
#include "core/compute_stream.h"
#include "core/nonmodel_memory.h"
#include "torch/device_backend.h"

namespace castor {

/// What a session does for a device that computes by itself; without one (the CPU device) it has no
/// effect. Owned by the session; functions may be called from any thread.
class SessionDevice {
 public:
  /// nullptr: the CPU device.
  explicit SessionDevice(std::shared_ptr<DeviceBackend> backend);

  [[nodiscard]] explicit operator bool() const noexcept { return backend_ != nullptr; }
  [[nodiscard]] DeviceBackend* get() const noexcept { return backend_.get(); }
  [[nodiscard]] c10::Device torch_device() const;

  /// What torch takes of the device from now on is `memory`'s.
  void follow(const std::shared_ptr<NonModelMemory>& memory);
  /// What orders the session's device memory; nullptr on the CPU device.
  [[nodiscard]] const std::shared_ptr<ComputeStream>& stream() const noexcept { return stream_; }
  /// The model runs on this thread's current stream from now on: a module event, a step, or
  /// somebody who reads what the device wrote.
  void follow_stream() const;
  /// Of this thread; the one there is on the CPU device. Throws as DeviceBackend's.
  [[nodiscard]] StreamId current_stream() const {
    return backend_ ? backend_->current_stream() : StreamId{};
  }
  /// As DeviceBackend::run_on, of stream(); nullptr on the CPU device.
  [[nodiscard]] std::unique_ptr<StreamScope> run_on_stream() const;
  /// Returns when the host sees what the device has been given to write so far, by this thread too.
  void await() const;
  /// Of stream(); nullptr on the CPU device.
  [[nodiscard]] std::shared_ptr<ComputeFence> fence() const;
  /// Before the host writes these bytes, or gives them back: returns when no copy in reads them.
  void host_writes(std::span<const std::byte> home) const;
  /// Homes go to the tensors that are left, and with the last of these to their arena: returns when
  /// no copy reads them.
  void leave(std::span<const std::shared_ptr<Payload>> homes) const noexcept;
  /// Whether the chunk's payloads lie in memory of a device that works on them itself: what it is
  /// given to do is behind what it has been given before, by the calling thread.
  [[nodiscard]] bool holds(const ChunkManager& chunks, ChunkId chunk) const {
    return backend_ != nullptr &&
           chunks.payload(chunk, PayloadKind::kParam)->tier() == TierKind::kDevice;
  }

 private:
  const std::shared_ptr<DeviceBackend> backend_;
  const std::shared_ptr<ComputeStream> stream_;
  std::shared_ptr<DeviceAccount> account_;
};

}  // namespace castor
