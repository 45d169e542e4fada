#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <vector>

#include "torch/optimizer_state.h"

// What lies in memory of a device that the host does not address (DeviceBackend). Copies go through
// torch, on the compute stream, and are rare: users' edits of weights, checkpoints. They may happen
// under the runtime's mutex, so they take no memory of torch's.
namespace castor {

std::vector<std::byte> OptimizerState::bytes_of_device(const std::byte* data,
                                                       std::size_t bytes) const {
  const at::NoGradGuard no_grad;
  std::vector<std::byte> copy(bytes);
  bytes_at(copy.data(), bytes, c10::kCPU).copy_(bytes_at(data, bytes, device_->device()));
  return copy;
}

void OptimizerState::copy_to_device(std::span<const std::byte> bytes, std::byte* target) const {
  const at::NoGradGuard no_grad;
  bytes_at(target, bytes.size(), device_->device())
      .copy_(bytes_at(bytes.data(), bytes.size(), c10::kCPU));
}

at::Tensor OptimizerState::on_host(ParamId param) const {
  const at::Tensor& own = params_[index(param)];
  return device_ == nullptr ? own : own.to(at::kCPU);
}

void OptimizerState::with_copies(ChunkId chunk, StreamAccess access,
                                 const std::function<void(const Memory&)>& work) const {
  const auto& kinds = kinds_[index(chunk)];
  std::vector<std::vector<std::byte>> copies;
  Memory memory{};
  for (const PayloadKind kind : kinds) {
    const Payload& payload = *manager_.payload(chunk, kind);
    copies.push_back(bytes_of_device(payload.data(), payload.bytes()));
    memory[static_cast<std::size_t>(kind)] = copies.back().data();
  }
  work(memory);
  for (std::size_t i = 0; i < kinds.size() && access != StreamAccess::kRead; ++i) {
    copy_to_device(copies[i], manager_.payload(chunk, kinds[i])->data());
  }
}

void OptimizerState::host_writes_home(ChunkId chunk) const {
  if (device_ != nullptr && !manager_.stored(chunk)) {  // else StoredWeights sees to it
    const Payload& home = *manager_.payload(chunk, PayloadKind::kParam);
    device_->host_writes({home.data(), home.bytes()});
  }
}

// All payloads of a chunk on the device, where they are.
OptimizerState::Memory OptimizerState::in_place(ChunkId chunk) const {
  return with_weights(chunk, resident(chunk));
}

void OptimizerState::update_on_device(std::span<const AdamSegment> segments) const {
  if (!segments.empty()) {
    device_->adam_update(segments, manager_.device().stream());
  }
}

}  // namespace castor
