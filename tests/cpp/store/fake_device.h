#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/copy_engine.h"
#include "core/error.h"
#include "core/fakes.h"
#include "optim/average.h"
#include "optim/test_support.h"
#include "parallel/async_copy_engine.h"
#include "parallel/immediate_copy_engine.h"
#include "store/device_backend.h"

// A device in host memory, for the tests of the stores: with kernels and memory of its own, or the
// host's.
namespace castor::testing {

/// Place where a FakeDevice computes: in kernels of its own, as a GPU does, or on the host.
enum class Computes { kOnHost, kByItself };

/// A lane whose copies run on threads of their own.
class FakeLane final : public DeviceLane {
 public:
  static constexpr StreamId kStream{77};

  explicit FakeLane(AsyncCopyOptions options) : copies_(std::move(options)) {}
  [[nodiscard]] StreamId stream() const noexcept override { return kStream; }
  [[nodiscard]] CopyEngine& copies() noexcept override { return copies_; }

 private:
  AsyncCopyEngine copies_;
};

/// A device whose memory is on the heap. It counts what it is asked for. Thread-safe.
class FakeDevice final : public DeviceBackend, private DeviceKernels {
 public:
  explicit FakeDevice(Computes computes = Computes::kOnHost) : computes_(computes) {}

  [[nodiscard]] DeviceId device() const noexcept override { return {.type = 1, .number = 3}; }
  [[nodiscard]] DeviceKernels* kernels() noexcept override {
    return computes_ == Computes::kByItself ? this : nullptr;
  }
  [[nodiscard]] StreamId current_stream() override { return locked(stream_); }
  void order(StreamId first, StreamId then) override {
    const std::lock_guard lock(mutex_);
    if (std::exchange(fails_, false)) {
      throw InjectedFailure("order");
    }
    orders_.emplace_back(first, then);
  }
  [[nodiscard]] std::shared_ptr<void> run_on(StreamId stream) override {
    const std::lock_guard lock(mutex_);
    const StreamId before = std::exchange(stream_, stream);
    return std::shared_ptr<void>(nullptr, [this, before](void*) { set_stream(before); });
  }
  [[nodiscard]] std::unique_ptr<CopyEngine> make_copy_engine() override {
    return std::make_unique<ImmediateCopyEngine>();
  }
  [[nodiscard]] std::unique_ptr<DeviceLane> make_lane() override {
    return std::make_unique<FakeLane>(locked(lane_options_));
  }
  [[nodiscard]] std::unique_ptr<Arena> make_device_arena() override {
    return std::make_unique<HeapArena>(device_blocks_);
  }
  [[nodiscard]] std::unique_ptr<Arena> make_host_arena() override {
    return std::make_unique<HeapArena>(host_blocks_);
  }
  [[nodiscard]] std::shared_ptr<void> lock_pages(std::span<std::byte> pages) override {
    const std::lock_guard lock(mutex_);
    if (std::exchange(fails_, false)) {
      throw Error("page-locking them was refused");
    }
    locked_bytes_ += pages.size();
    return {pages.data(), [this, bytes = pages.size()](void*) {
              const std::lock_guard lock(mutex_);
              locked_bytes_ -= bytes;
            }};
  }
  void follow(const std::shared_ptr<DeviceAccount>& account) override {
    const std::lock_guard lock(mutex_);
    if (std::exchange(fails_, false)) {
      throw InjectedFailure("follow");
    }
    followed_.push_back(account);
  }
  void copy_from_device(std::span<const std::byte> source, std::byte* target) override {
    note(copied_from_, source.size());
    DeviceBackend::copy_from_device(source, target);
  }
  void copy_to_device(std::span<const std::byte> source, std::byte* target) override {
    note(copied_to_, source.size());
    DeviceBackend::copy_to_device(source, target);
  }
  [[nodiscard]] std::unique_ptr<ComputeFence> fence(StreamId stream) override {
    return std::make_unique<Fence>(*this, stream);
  }
  void host_writes(std::span<const std::byte> host) override {
    const std::lock_guard lock(mutex_);
    if (std::exchange(fails_, false)) {
      throw InjectedFailure("host_writes");
    }
    host_writes_.push_back(host.data());
  }

  /// Sets how lanes that are made from now on copy.
  void set_lane(AsyncCopyOptions options) {
    const std::lock_guard lock(mutex_);
    lane_options_ = std::move(options);
  }
  void set_stream(StreamId stream) {
    const std::lock_guard lock(mutex_);
    stream_ = stream;
  }
  /// The next order(), lock_pages(), follow(), host_writes() or wait for a fence throws.
  void fail_next() {
    const std::lock_guard lock(mutex_);
    fails_ = true;
  }
  [[nodiscard]] std::vector<std::pair<StreamId, StreamId>> orders() const {
    return locked(orders_);
  }
  /// Addresses that host_writes() was called with.
  [[nodiscard]] std::vector<const std::byte*> written_by_host() const {
    return locked(host_writes_);
  }
  /// Streams behind which fences were waited for.
  [[nodiscard]] std::vector<StreamId> fences() const { return locked(fences_); }
  /// Streams that updates were given to.
  [[nodiscard]] std::vector<StreamId> updates() const { return locked(updates_); }
  [[nodiscard]] std::size_t num_followed() const { return locked(followed_).size(); }
  /// Bytes that are locked now.
  [[nodiscard]] std::size_t locked_bytes() const { return locked(locked_bytes_); }
  /// Bytes of copy_from_device() and copy_to_device().
  [[nodiscard]] std::size_t bytes_copied_from() const { return locked(copied_from_); }
  [[nodiscard]] std::size_t bytes_copied_to() const { return locked(copied_to_); }
  [[nodiscard]] const LiveBlocks& device_blocks() const { return *device_blocks_; }
  [[nodiscard]] const LiveBlocks& host_blocks() const { return *host_blocks_; }

 private:
  class Fence final : public ComputeFence {
   public:
    Fence(FakeDevice& device, StreamId stream) : device_(device), stream_(stream) {}
    void wait() override {
      const std::lock_guard lock(device_.mutex_);
      if (std::exchange(device_.fails_, false)) {
        throw InjectedFailure("fence");
      }
      device_.fences_.push_back(stream_);
    }

   private:
    FakeDevice& device_;
    const StreamId stream_;
  };

  [[nodiscard]] bool has(std::string_view rule) const noexcept override { return rule == "adam"; }
  void update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
              StreamId stream) override {
    InlineExecutor executor;
    rule.update(executor, segments);
    const std::lock_guard lock(mutex_);
    updates_.push_back(stream);
  }
  void square_norms(std::span<const NormSegment> /*segments*/, std::span<double> /*sums*/,
                    StreamId /*stream*/) override {}
  void average(void* mean, const void* parts, std::size_t count, std::size_t numel, ScalarType type,
               StreamId /*stream*/) override {
    castor::average(nullptr, mean, parts, count, numel, type);
  }

  template <typename T>
  [[nodiscard]] T locked(const T& value) const {
    const std::lock_guard lock(mutex_);
    return value;
  }
  void note(std::size_t& total, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    total += bytes;
  }

  const Computes computes_;
  const std::shared_ptr<LiveBlocks> device_blocks_ = std::make_shared<LiveBlocks>();
  const std::shared_ptr<LiveBlocks> host_blocks_ = std::make_shared<LiveBlocks>();
  mutable std::mutex mutex_;  // guards all below
  StreamId stream_{};
  bool fails_ = false;
  AsyncCopyOptions lane_options_;
  std::size_t locked_bytes_ = 0;
  std::vector<std::pair<StreamId, StreamId>> orders_;
  std::vector<const std::byte*> host_writes_;
  std::vector<StreamId> fences_;
  std::vector<StreamId> updates_;
  std::vector<std::shared_ptr<DeviceAccount>> followed_;
  std::size_t copied_from_ = 0;
  std::size_t copied_to_ = 0;
};

}  // namespace castor::testing
