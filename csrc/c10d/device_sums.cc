#include "c10d/device_sums.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "c10d/group_backend.h"
#include "core/chunk_layout.h"
#include "core/units.h"
#include "ranks/rank_reduction.h"
#include "torch/chunk_storages.h"

namespace castor {
namespace {

at::Tensor bytes_at(std::byte* data, std::size_t bytes, c10::Device device) {
  const std::int64_t size = static_cast<std::int64_t>(bytes);
  return at::for_blob(data, size)
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

DeviceSums::DeviceSums(std::shared_ptr<DeviceConnection> connection, c10::Device device,
                       Reduction reduction)
    : connection_(std::move(connection)),
      device_(device),
      reduction_(reduction),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

void DeviceSums::join(std::shared_ptr<Collectives> host, std::shared_ptr<DeviceBackend> backend) {
  host_ = std::move(host);
  backend_ = std::move(backend);
  ranks_.emplace(connection_, device_, *host_, reduction_);
}

std::size_t DeviceSums::window_bytes(std::size_t largest) const {
  const std::size_t piece = RankReduction::piece_bytes(largest, ranks());
  return piece + (reduction_ == Reduction::kOrdered ? piece : piece / ranks());
}

std::size_t DeviceSums::most_of_shard() const {
  const std::size_t shards = reduction_ == Reduction::kOrdered ? 2 * ranks() : ranks() + 1;
  return window_.size() / shards / kParamAlignment * kParamAlignment;
}

void DeviceSums::use_window(std::span<std::byte> window) {
  window_ = window;
  // Work given before may still use the memory.
  c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
}

void DeviceSums::finish() {
  stream_.synchronize();
  ranks_->check();
}

at::Tensor DeviceSums::on_device(std::span<std::byte> bytes) const {
  return bytes_at(bytes.data(), bytes.size(), device_);
}

DeviceSums::Piece DeviceSums::piece_of(std::span<std::byte> values, From from, std::size_t begin,
                                       std::size_t bytes) {
  const Piece piece{.given = window_.first(ranks() * bytes),
                    .mean = window_.data() + ranks() * most_of_shard()};
  if (from == From::kDevice && ranks() * bytes == values.size()) {
    return {.given = values, .mean = piece.mean};
  }
  const c10::Device source = from == From::kHost ? c10::Device(at::kCPU) : device_;
  const std::size_t shard = values.size() / ranks();
  for (std::size_t rank = 0; rank < ranks(); ++rank) {
    on_device(piece.given.subspan(rank * bytes, bytes))
        .copy_(bytes_at(values.data() + rank * shard + begin, bytes, source),
               /*non_blocking=*/true);
  }
  return piece;
}

void DeviceSums::reduce_scatter(const Piece& piece, ScalarType type) {
  const at::Tensor given = on_device(piece.given);
  const std::size_t bytes = piece.given.size() / ranks();
  if (reduction_ == Reduction::kBackend) {
    ranks_->reduce_scatter(given.view(to_torch(type)),
                           on_device({piece.mean, bytes}).view(to_torch(type)),
                           DeviceCollectives::Result::kMean);
    return;
  }
  ranks_->all_to_all(given, on_device({piece.mean, ranks() * bytes}));
  backend_->kernels()->average(piece.mean, piece.mean, ranks(), bytes / size_of(type), type,
                               backend_->current_stream());
}

void DeviceSums::all_reduce_mean(std::span<std::byte> values, ScalarType type) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard on(stream_);
  if (reduction_ == Reduction::kOrdered) {
    all_reduce_in_order(values, type);
  } else {
    ranks_->all_reduce(on_device(values).view(to_torch(type)), DeviceCollectives::Result::kMean);
  }
  finish();
}

void DeviceSums::all_reduce_in_order(std::span<std::byte> values, ScalarType type) {
  const std::size_t shard = values.size() / ranks();
  const std::size_t most = most_of_shard();
  for (std::size_t begin = 0; begin < shard; begin += most) {
    const std::size_t bytes = std::min(most, shard - begin);
    const Piece piece = piece_of(values, From::kDevice, begin, bytes);
    reduce_scatter(piece, type);
    ranks_->all_gather(on_device({piece.mean, bytes}), on_device(piece.given));
    for (std::size_t rank = 0; rank < ranks() && piece.given.data() != values.data(); ++rank) {
      on_device(values.subspan(rank * shard + begin, bytes))
          .copy_(on_device(piece.given.subspan(rank * bytes, bytes)), /*non_blocking=*/true);
    }
  }
}

void DeviceSums::all_gather(std::span<std::byte> all) {
  const c10::StreamGuard on(stream_);
  const std::size_t shard = all.size() / ranks();
  ranks_->all_gather(on_device(all.subspan(host_->rank() * shard, shard)), on_device(all));
  finish();
}

void DeviceSums::reduce_scatter_mean(std::span<const std::byte> values, From from,
                                     std::span<std::byte> shard, ScalarType type) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard on(stream_);
  const std::span given(const_cast<std::byte*>(values.data()), values.size());
  const std::size_t most = most_of_shard();
  for (std::size_t begin = 0; begin < shard.size(); begin += most) {
    const std::size_t bytes = std::min(most, shard.size() - begin);
    const Piece piece = piece_of(given, from, begin, bytes);
    reduce_scatter(piece, type);
    bytes_at(shard.data() + begin, bytes, at::kCPU)
        .copy_(on_device({piece.mean, bytes}), /*non_blocking=*/true);
  }
  finish();
}

void DeviceSums::leave() noexcept {
  if (ranks_) {
    ranks_->abort("it has let go of the model itself");
  }
}

void DeviceSums::look() noexcept {
  if (ranks_) {
    ranks_->look();
  }
}

}  // namespace castor
