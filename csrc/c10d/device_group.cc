#include "c10d/device_group.h"

#include "c10d/group_backend.h"

namespace castor {

void DeviceConnection::abort(const std::string& why) noexcept {
  {
    const MutexLock lock(mutex_);
    if (!aborted_.empty()) {
      return;
    }
    aborted_ = why;
  }
  try {
    backend_->abort();
  } catch (...) {  // NOLINT(bugprone-empty-catch): it has ended
  }
}

std::string DeviceConnection::aborted() const {
  const MutexLock lock(mutex_);
  return aborted_;
}

DeviceGroup::DeviceGroup(const std::string& name, c10::Device device)
    : connection_(std::make_shared<DeviceConnection>(backend_for(name, device.type()))) {}

}  // namespace castor
