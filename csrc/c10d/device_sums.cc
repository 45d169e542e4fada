#include "c10d/device_sums.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "c10d/group_backend.h"
#include "core/chunk_layout.h"
#include "core/units.h"
#include "torch/chunk_storages.h"

namespace castor {
namespace {

/// Gradients of so many bytes go to the device at once.
constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

at::Tensor bytes_at(std::byte* data, std::size_t bytes, c10::Device device) {
  const std::int64_t size = static_cast<std::int64_t>(bytes);
  return at::for_blob(data, size)
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

DeviceSums::DeviceSums(std::string group, c10::Device device)
    : group_(std::move(group)),
      device_(device),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

void DeviceSums::join(std::shared_ptr<Collectives> host) {
  host_ = std::move(host);
  ranks_.emplace(group_, device_, *host_, Reduction::kBackend);
}

std::size_t DeviceSums::window_bytes(std::size_t largest) const {
  const std::size_t ranks = host_->size();
  const std::size_t piece =
      align_up(std::clamp<std::size_t>(largest, 1, kPieceBytes), ranks * kParamAlignment);
  return piece + piece / ranks;
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

void DeviceSums::all_reduce_mean(std::span<std::byte> values, ScalarType type) {
  const c10::StreamGuard on(stream_);
  ranks_->all_reduce(bytes_at(values.data(), values.size(), device_).view(to_torch(type)),
                     DeviceCollectives::Result::kMean);
  finish();
}

void DeviceSums::all_gather(std::span<std::byte> all) {
  const c10::StreamGuard on(stream_);
  const std::size_t shard = all.size() / host_->size();
  ranks_->all_gather(bytes_at(all.data() + host_->rank() * shard, shard, device_),
                     bytes_at(all.data(), all.size(), device_));
  finish();
}

void DeviceSums::reduce_scatter_mean(std::span<const std::byte> values, From from,
                                     std::span<std::byte> shard, ScalarType type) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard on(stream_);
  const std::size_t ranks = host_->size();
  const std::size_t most = window_.size() / (ranks + 1) / kParamAlignment * kParamAlignment;
  const c10::Device source = from == From::kHost ? c10::Device(at::kCPU) : device_;
  for (std::size_t begin = 0; begin < shard.size(); begin += most) {
    const std::size_t bytes = std::min(most, shard.size() - begin);
    auto* const given = const_cast<std::byte*>(values.data());
    const bool in_place = from == From::kDevice && bytes == shard.size();
    for (std::size_t rank = 0; rank < ranks && !in_place; ++rank) {
      bytes_at(window_.data() + rank * bytes, bytes, device_)
          .copy_(bytes_at(given + rank * shard.size() + begin, bytes, source),
                 /*non_blocking=*/true);
    }
    const at::Tensor all = bytes_at(in_place ? given : window_.data(), ranks * bytes, device_);
    const at::Tensor mean = bytes_at(window_.data() + ranks * most, bytes, device_);
    ranks_->reduce_scatter(all.view(to_torch(type)), mean.view(to_torch(type)),
                           DeviceCollectives::Result::kMean);
    bytes_at(shard.data() + begin, bytes, at::kCPU).copy_(mean, /*non_blocking=*/true);
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
