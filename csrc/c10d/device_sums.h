#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "c10d/device_collectives.h"
#include "core/backend_sums.h"
#include "core/collectives.h"

namespace castor {

/// Collectives of gradients, or weights, by a process group whose backend sends device memory:
/// NCCL.
///
/// Gradients in memory of the host go to the device in pieces, and each rank's shard of their mean
/// comes back. All of it runs on a stream of its own, beside the device's computing; the host waits
/// once a call. Python owns an object and has it looked at once a second, so that a lost rank ends
/// what waits for it (DeviceCollectives). One thread at a time reduces; look() and leave() may be
/// called from any thread.
class DeviceSums final : public BackendSums {
 public:
  /// Takes the process group by its name. Throws UsageError as DeviceCollectives.
  DeviceSums(std::string group, c10::Device device);

  /// Takes the same ranks' collectives of the host, which know of lost ranks. Called once, before
  /// all else.
  void join(std::shared_ptr<Collectives> host);

  [[nodiscard]] std::size_t window_bytes(std::size_t largest) const override;
  void use_window(std::span<std::byte> window) override;
  void all_reduce_mean(std::span<std::byte> values, ScalarType type) override;
  void all_gather(std::span<std::byte> all) override;
  void reduce_scatter_mean(std::span<const std::byte> values, From from, std::span<std::byte> shard,
                           ScalarType type) override;
  void leave() noexcept override;
  /// See DeviceCollectives.
  void look() noexcept;

 private:
  void finish();

  const std::string group_;
  const c10::Device device_;
  const c10::Stream stream_;
  std::shared_ptr<Collectives> host_;
  std::optional<DeviceCollectives> ranks_;
  std::span<std::byte>
      window_;  // a piece of all shards, and this rank's shard of the mean behind it
};

}  // namespace castor
