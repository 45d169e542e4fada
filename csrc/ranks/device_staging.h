#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "core/copy_engine.h"
#include "core/memory_tier.h"
#include "core/payload.h"

namespace castor {

/// Host memory through which ranks exchange payloads in memory of a device that the host does not
/// address. For a payload that is resident on the device, this memory is the payload's host
/// storage, which is idle meanwhile. For a payload whose storage is on the device, it is a block
/// that is kept for the purpose. Every call returns when its copies are over. Used by one thread at
/// a time, while nobody else uses the payload.
class DeviceStaging {
 public:
  /// Makes the staging of a process whose host addresses all payloads: nothing is copied.
  DeviceStaging() = default;
  /// Makes staging for payloads on `device`. Copies are ordered behind all work that the stream of
  /// `device` has been given. `block` is as large as the largest payload whose storage is on the
  /// device; it may be empty. No copy of `copies` waits for an update: the updates of other chunks
  /// may be behind the one that waits here. `device` outlives this.
  DeviceStaging(std::shared_ptr<CopyEngine> copies, const MemoryTier& device, Block block)
      : copies_(std::move(copies)), device_(&device), block_(std::move(block)) {}

  /// Returns the host memory that holds the payload's bytes, or will hold their new values.
  [[nodiscard]] std::span<std::byte> on_host(const Payload& payload) const noexcept;
  /// Copies the payload's bytes into this part of on_host(). Rethrows a copy's failure.
  void bring(const Payload& payload, std::span<std::byte> part);
  /// Copies this part of on_host() into the payload. Rethrows a copy's failure.
  void send(const Payload& payload, std::span<const std::byte> part);

  /// Returns when the device's stream has done what it was given before. Requires staged().
  void await_stream(const Payload& payload);

  /// Returns whether the payload's bytes are where the host does not address them.
  [[nodiscard]] bool staged(const Payload& payload) const noexcept {
    return copies_ != nullptr && payload.tier() == TierKind::kDevice;
  }

 private:
  /// Returns the bytes of the payload, in memory of the device, that belong to a part of on_host().
  [[nodiscard]] std::span<std::byte> on_device(const Payload& payload,
                                               std::span<const std::byte> part) const noexcept {
    return {payload.data() + (part.data() - on_host(payload).data()), part.size()};
  }

  std::shared_ptr<CopyEngine> copies_;
  const MemoryTier* device_ = nullptr;
  Block block_;
};

}  // namespace castor
