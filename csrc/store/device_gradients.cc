#include "store/device_gradients.h"

#include <algorithm>
#include <utility>

namespace castor {
namespace {

constexpr std::size_t kMostBuffers = 3;

auto is_taken_by(ChunkId chunk) {
  return [chunk](const auto& buffer) { return buffer.taken && buffer.chunk == chunk; };
}

}  // namespace

DeviceGradients::Buffers DeviceGradients::buffers(const ChunkLayout& layout,
                                                  const std::vector<bool>& gathers) {
  Buffers buffers;
  for (std::size_t i = 0; i < gathers.size(); ++i) {
    if (gathers[i]) {
      buffers.bytes = std::max(buffers.bytes, layout.chunks()[i].used_bytes);
      buffers.count = std::min(buffers.count + 1, kMostBuffers);
    }
  }
  return buffers;
}

DeviceGradients::Buffers DeviceGradients::most_buffers(const ChunkLayout& layout) {
  std::vector<bool> gathers;
  for (const ChunkSpec& chunk : layout.chunks()) {
    gathers.push_back(chunk.trainable);
  }
  return buffers(layout, gathers);
}

DeviceGradients::DeviceGradients(const ChunkLayout& layout, const std::vector<bool>& gathers,
                                 MemoryTier& device, std::shared_ptr<CopyEngine> copies)
    : layout_(layout), device_(device), copies_(std::move(copies)) {
  const Buffers wanted = buffers(layout, gathers);
  for (std::size_t i = 0; i < wanted.count; ++i) {
    buffers_.push_back({.memory = device.allocate(
                            wanted.bytes,
                            "gradients gather in it until the ranks have reduced them; "
                            "raise device_memory, make chunks smaller (chunk_bytes), or give "
                            "reduce_on='host'"),
                        .params = {}});
  }
}

const DeviceGradients::Buffer* DeviceGradients::of(ChunkId chunk) const {
  const auto found = std::ranges::find_if(buffers_, is_taken_by(chunk));
  return found == buffers_.end() ? nullptr : &*found;
}

DeviceGradients::Buffer* DeviceGradients::of(ChunkId chunk) {
  const auto found = std::ranges::find_if(buffers_, is_taken_by(chunk));
  return found == buffers_.end() ? nullptr : &*found;
}

bool DeviceGradients::begin(ChunkId chunk) {
  const MutexLock lock(mutex_);
  const auto free = std::ranges::find_if(buffers_, [](const Buffer& one) { return !one.taken; });
  if (free == buffers_.end()) {
    return false;
  }
  free->taken = true;
  free->chunk = chunk;
  free->params.assign(layout_.chunk(chunk).params.size(), false);
  free->written = false;
  return true;
}

bool DeviceGradients::gathering(ChunkId chunk) const {
  const MutexLock lock(mutex_);
  return of(chunk) != nullptr;
}

bool DeviceGradients::add(ParamId param, const Write& write) {
  const ChunkId chunk = layout_.place(param).chunk;
  const auto& params = layout_.chunk(chunk).params;
  const MutexLock lock(mutex_);
  Buffer* const own = of(chunk);
  if (own == nullptr) {
    return false;
  }
  write({own->memory.data(), layout_.chunk(chunk).used_bytes}, !own->written);
  own->written = true;
  own->params[static_cast<std::size_t>(std::ranges::find(params, param) - params.begin())] = true;
  return true;
}

bool DeviceGradients::complete(ChunkId chunk) const {
  const MutexLock lock(mutex_);
  const Buffer* const own = of(chunk);
  return own != nullptr && std::ranges::find(own->params, false) == own->params.end();
}

std::span<const std::byte> DeviceGradients::values(ChunkId chunk) const {
  const MutexLock lock(mutex_);
  const Buffer* const own = of(chunk);
  return own == nullptr
             ? std::span<const std::byte>()
             : std::span<const std::byte>(own->memory.data(), layout_.chunk(chunk).used_bytes);
}

void DeviceGradients::release(ChunkId chunk, std::size_t bytes) {
  const MutexLock lock(mutex_);
  of(chunk)->taken = false;
  bytes_moved_ += bytes;
}

void DeviceGradients::move_to_host(ChunkId chunk, const Target& target) {
  const MutexLock lock(mutex_);
  Buffer* const own = of(chunk);
  if (own == nullptr) {
    return;
  }
  std::byte* const storage = target();
  const auto& params = layout_.chunk(chunk).params;
  CopyTicket last = CopyTicket::kNone;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& spec = layout_.param(params[i]);
    const std::size_t offset = layout_.place(params[i]).offset * size_of(spec.type);
    const std::size_t bytes = spec.numel * size_of(spec.type);
    if (!own->params[i] || bytes == 0) {
      continue;
    }
    last = copies_->submit({.source = {own->memory.data() + offset, bytes},
                            .target = {storage + offset, bytes},
                            .direction = CopyDirection::kDeviceToHost,
                            .behind = device_.stream(),
                            .await_source = {}});
    bytes_moved_ += bytes;
  }
  copies_->wait(last);  // copies of one direction complete in the order of submission
  own->taken = false;
}

}  // namespace castor
