#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "core/copy_engine.h"
#include "core/memory_tier.h"
#include "core/payload.h"

namespace castor {

/// Host memory through which ranks exchange payloads that lie in memory of a device, which the host
/// does not address: a promoted payload's home, which is idle meanwhile, or, where a payload's home
/// is on the device, a block that is kept for it. Every call returns when its copies are over.
/// Used by one thread at a time, while nobody else uses the payload.
class DeviceStaging {
 public:
  /// Of a process whose host addresses all payloads: nothing is copied.
  DeviceStaging() = default;
  /// Copies are behind what the stream of `device`, where payloads lie, has been given. `block`: as
  /// large as the largest payload with a home there; may be empty. Both outlive this.
  DeviceStaging(CopyEngine& copies, const MemoryTier& device, Block block)
      : copies_(&copies), device_(&device), block_(std::move(block)) {}

  /// Where the host has the payload's bytes, or will have what becomes of them.
  [[nodiscard]] std::span<std::byte> on_host(const Payload& payload) const noexcept;
  /// The payload's bytes come into this part of on_host(). Rethrows a copy's failure.
  void bring(const Payload& payload, std::span<std::byte> part);
  /// This part of on_host() becomes the payload's. Rethrows a copy's failure.
  void send(const Payload& payload, std::span<const std::byte> part);

 private:
  [[nodiscard]] bool staged(const Payload& payload) const noexcept {
    return copies_ != nullptr && payload.tier() == TierKind::kDevice;
  }
  /// In memory of the device: of a part of on_host().
  [[nodiscard]] std::span<std::byte> on_device(const Payload& payload,
                                               std::span<const std::byte> part) const noexcept {
    return {payload.data() + (part.data() - on_host(payload).data()), part.size()};
  }

  CopyEngine* copies_ = nullptr;
  const MemoryTier* device_ = nullptr;
  Block block_;
};

}  // namespace castor
