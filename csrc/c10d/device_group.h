#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <utility>

#include "core/mutex.h"

namespace castor {

/// The backend of one process group that sends memory of devices: NCCL's communicators. Owned by a
/// DeviceGroup and jointly by all that exchange tensors through it. Thread-safe.
class DeviceConnection {
 public:
  explicit DeviceConnection(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}

  [[nodiscard]] c10d::Backend& backend() const noexcept { return *backend_; }
  /// Ends all work that is under way, now and for good. `why` is for the errors of later calls; the
  /// first one counts.
  void abort(const std::string& why) noexcept;
  /// Returns why the backend has been aborted; empty: it has not.
  [[nodiscard]] std::string aborted() const;

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
  mutable Mutex mutex_;
  std::string aborted_ CASTOR_GUARDED_BY(mutex_);
};

/// A process group between devices, and whether anything uses it. Owned by Python, which ends the
/// group on all ranks together when nothing does.
class DeviceGroup {
 public:
  /// Takes a process group by its name in torch.distributed. Throws UsageError where there is no
  /// such group, or where it has no backend for the device.
  DeviceGroup(const std::string& name, c10::Device device);

  /// Returns the connection, which counts as used until the caller lets go of it.
  [[nodiscard]] std::shared_ptr<DeviceConnection> connection() const noexcept {
    return connection_;
  }
  [[nodiscard]] bool used() const noexcept { return connection_.use_count() > 1; }
  /// See DeviceConnection.
  [[nodiscard]] std::string aborted() const { return connection_->aborted(); }
  void abort(const std::string& why) noexcept { connection_->abort(why); }

 private:
  const std::shared_ptr<DeviceConnection> connection_;
};

}  // namespace castor
