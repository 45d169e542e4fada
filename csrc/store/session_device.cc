#include "store/session_device.h"

#include <utility>

namespace castor {

SessionDevice::SessionDevice(std::shared_ptr<DeviceBackend> backend)
    : backend_(std::move(backend)),
      stream_(std::make_shared<ComputeStream>(
          backend_->current_stream(),
          [device = backend_](StreamId first, StreamId then) { device->order(first, then); })) {}

void SessionDevice::await() const {
  follow_stream();
  fence()->wait();
}

void SessionDevice::leave(std::span<const std::shared_ptr<Payload>> host_payloads) const noexcept {
  try {
    fence()->wait();  // whatever stream this thread, perhaps a garbage collector's, is on
    for (const auto& payload : host_payloads) {
      host_writes({payload->data(), payload->bytes()});
    }
  } catch (...) {  // the device is lost, and its copies with it
  }
}

}  // namespace castor
