#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/fault_injection.h"
#include "store/device_backend.h"

namespace castor::testing {

/// A disk that fails as it is told. The sessions of its devices read and write through engines with
/// faults, each of which counts its operations anew. Thread-safe.
class FaultyDisk {
 public:
  /// Gives the engines that are made from now on these faults (parse_io_faults).
  void set(std::vector<IoFault> faults) {
    const std::lock_guard lock(mutex_);
    faults_ = std::move(faults);
  }
  /// Returns the counts of all its engines.
  [[nodiscard]] IoFaultCounts counts() const noexcept { return total_.counts(); }
  [[nodiscard]] std::unique_ptr<IoEngine> engine(std::unique_ptr<IoEngine> sound) {
    const std::lock_guard lock(mutex_);
    return std::make_unique<FaultyIoEngine>(std::move(sound), faults_,
                                            FaultyIoEngine::Options{.total = &total_});
  }

 private:
  std::mutex mutex_;
  std::vector<IoFault> faults_;
  IoFaultTally total_;
};

/// Any device, with the faulty disk.
class DeviceWithFaultyDisk final : public DeviceBackend {
 public:
  DeviceWithFaultyDisk(std::shared_ptr<DeviceBackend> device, std::shared_ptr<FaultyDisk> disk)
      : device_(std::move(device)), disk_(std::move(disk)) {}

  [[nodiscard]] std::unique_ptr<IoEngine> io_engine(std::unique_ptr<IoEngine> host) override {
    return disk_->engine(device_->io_engine(std::move(host)));
  }

  // As the device.
  [[nodiscard]] DeviceId device() const noexcept override { return device_->device(); }
  [[nodiscard]] DeviceKernels* kernels() noexcept override { return device_->kernels(); }
  [[nodiscard]] StreamId current_stream() override { return device_->current_stream(); }
  void order(StreamId first, StreamId then) override { device_->order(first, then); }
  [[nodiscard]] std::shared_ptr<void> run_on(StreamId stream) override {
    return device_->run_on(stream);
  }
  [[nodiscard]] std::unique_ptr<CopyEngine> make_copy_engine() override {
    return device_->make_copy_engine();
  }
  [[nodiscard]] std::unique_ptr<CopyEngine> make_staging_engine() override {
    return device_->make_staging_engine();
  }
  [[nodiscard]] std::unique_ptr<DeviceLane> make_lane() override { return device_->make_lane(); }
  [[nodiscard]] std::unique_ptr<Arena> make_device_arena() override {
    return device_->make_device_arena();
  }
  [[nodiscard]] std::unique_ptr<Arena> make_host_arena() override {
    return device_->make_host_arena();
  }
  [[nodiscard]] std::shared_ptr<void> lock_pages(std::span<std::byte> pages) override {
    return device_->lock_pages(pages);
  }
  void follow(const std::shared_ptr<DeviceAccount>& account) override { device_->follow(account); }
  [[nodiscard]] std::size_t allocated_for(std::size_t bytes) const noexcept override {
    return device_->allocated_for(bytes);
  }
  [[nodiscard]] bool stop_counting(void* data) noexcept override {
    return device_->stop_counting(data);
  }
  void copy_from_device(std::span<const std::byte> source, std::byte* target) override {
    device_->copy_from_device(source, target);
  }
  void copy_to_device(std::span<const std::byte> source, std::byte* target) override {
    device_->copy_to_device(source, target);
  }
  [[nodiscard]] std::unique_ptr<ComputeFence> fence(StreamId stream) override {
    return device_->fence(stream);
  }
  void host_writes(std::span<const std::byte> host) override { device_->host_writes(host); }

 private:
  const std::shared_ptr<DeviceBackend> device_;
  const std::shared_ptr<FaultyDisk> disk_;
};

}  // namespace castor::testing
