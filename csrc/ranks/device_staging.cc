#include "ranks/device_staging.h"

#include <algorithm>

#include "core/chunk_layout.h"

namespace castor {

std::span<std::byte> DeviceStaging::on_host(const Payload& payload) const noexcept {
  std::byte* const data = !staged(payload) ? payload.data()
                          : payload.away() ? payload.host_storage()
                                           : block_.data();
  return {data, payload.bytes()};
}

void DeviceStaging::bring(const Payload& payload, std::span<std::byte> part) {
  if (staged(payload) && !part.empty()) {
    copies_->wait(copies_->submit({.source = on_device(payload, part),
                                   .target = part,
                                   .direction = CopyDirection::kDeviceToHost,
                                   .behind = device_->stream(),
                                   .await_source = {}}));
  }
}

void DeviceStaging::await_stream(const Payload& payload) {
  bring(payload, on_host(payload).first(std::min(payload.bytes(), kParamAlignment)));
}

void DeviceStaging::send(const Payload& payload, std::span<const std::byte> part) {
  if (staged(payload) && !part.empty()) {
    copies_->wait(copies_->submit({.source = part,
                                   .target = on_device(payload, part),
                                   .direction = CopyDirection::kHostToDevice,
                                   .behind = device_->stream(),
                                   .await_source = {}}));
  }
}

}  // namespace castor
