#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

namespace castor {

/// Name of an order in which a device does work: the handle of a CUDA stream. A device that
/// computes on the thread that calls it has one, 0.
enum class StreamId : std::uint64_t {};

/// The one order in which a session uses device memory. It follows the stream that the model runs
/// on: move_to makes the next stream wait for all work of the previous one. Work behind id() is
/// therefore behind every earlier use of a slot, on whichever stream that was.
///
/// Shared by the session and the tier whose memory it orders. Thread-safe.
class ComputeStream {
 public:
  /// Makes work that `then` is given from now on wait for the work that `first` has been given.
  using Order = std::function<void(StreamId first, StreamId then)>;

  ComputeStream(StreamId stream, Order order) : order_(std::move(order)), id_(stream) {}

  /// Moves the model to `stream` from now on. Throws what Order throws; nothing has changed then.
  void move_to(StreamId stream) {
    if (id() == stream) {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (id() != stream) {
      order_(id(), stream);
      id_.store(stream, std::memory_order_release);
    }
  }
  /// Returns the stream that the model runs on; another thread may move it meanwhile. A caller that
  /// knows, by the runtime's mutex, that a slot's last use is over gets that use's stream or one
  /// behind it.
  [[nodiscard]] StreamId id() const noexcept { return id_.load(std::memory_order_acquire); }

 private:
  const Order order_;
  std::mutex mutex_;  // held while one stream is ordered behind another
  // Release and acquire: a thread that sees the new stream sees it ordered behind the old one.
  std::atomic<StreamId> id_;
};

}  // namespace castor
