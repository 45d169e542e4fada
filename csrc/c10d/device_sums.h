#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "c10d/device_collectives.h"
#include "c10d/device_group.h"
#include "core/collectives.h"
#include "core/device_reduction.h"
#include "store/device_backend.h"

namespace castor {

/// Collectives of gradients, or weights, by a process group whose backend sends device memory:
/// NCCL.
///
/// With Reduction::kOrdered ranks exchange shards (all-to-all), and a kernel adds them up in rank
/// order. With kBackend the backend reduces.
///
/// Gradients in memory of the host go to the device in pieces, and each rank's shard of their mean
/// comes back. All of it runs on a stream of its own, beside the device's computing, and takes no
/// memory but the window; the host waits once a call. Python owns an object and has it looked at
/// once a second, so that a lost rank ends what waits for it (DeviceCollectives). One thread at a
/// time reduces; look() and leave() may be called from any thread.
class DeviceSums final : public DeviceReduction {
 public:
  /// Takes the connection of a process group for the device.
  DeviceSums(std::shared_ptr<DeviceConnection> connection, c10::Device device, Reduction reduction);

  /// Takes the same ranks' collectives of the host, which know of lost ranks, and the device's
  /// backend, whose kernels add up. Called once, before all else.
  void join(std::shared_ptr<Collectives> host, std::shared_ptr<DeviceBackend> backend);

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
  // Shards of each rank that pass through the window at once, of which this rank's mean is next.
  struct Piece {
    std::span<std::byte> given;  // shards of this rank's values, one for each rank
    std::byte* mean;             // in the window; behind it, room for the others' shards
  };
  void finish();
  [[nodiscard]] std::size_t ranks() const { return host_->size(); }
  // Returns the bytes of a shard for which the window has room.
  [[nodiscard]] std::size_t most_of_shard() const;
  // Returns the piece of `bytes` from `begin` on in each shard of `values`, brought to the window
  // where it is not all of them, or not on the device.
  [[nodiscard]] Piece piece_of(std::span<std::byte> values, From from, std::size_t begin,
                               std::size_t bytes);
  // Gives the stream the mean of this rank's shard.
  void reduce_scatter(const Piece& piece, ScalarType type);
  void all_reduce_in_order(std::span<std::byte> values, ScalarType type);
  [[nodiscard]] at::Tensor on_device(std::span<std::byte> bytes) const;

  const std::shared_ptr<DeviceConnection> connection_;
  const c10::Device device_;
  const Reduction reduction_;
  const c10::Stream stream_;
  std::shared_ptr<Collectives> host_;
  std::shared_ptr<DeviceBackend> backend_;
  std::optional<DeviceCollectives> ranks_;
  // A piece of all shards. Behind it this rank's shard of the mean; in order a piece as well, of
  // the other ranks' values, whose first shard becomes the mean.
  std::span<std::byte> window_;
};

}  // namespace castor
