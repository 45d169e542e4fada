#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <stop_token>
#include <thread>

#include "core/copy_tickets.h"
#include "core/mutex.h"

namespace castor {

/// Copies request.source to request.target; may throw.
using CopyFunction = std::function<void(const CopyRequest& request)>;

struct AsyncCopyOptions {
  /// Bytes per second of an emulated link, for each direction on its own; 0: as fast as memory is.
  /// With it the times of a GPU's link can be tried, and overlap be proved, on any machine.
  std::uint64_t bytes_per_second = 0;
  /// Function that the threads run; memcpy by default. Tests delay and fail copies here.
  CopyFunction copy;
};

/// The copy engine of the CPU "device" that works beside the compute, with one thread for each
/// direction, as a GPU has one stream for each. submit() returns at once. Copies of one direction
/// run in the order of submission, those of different directions at the same time.
///
/// A copy that fails leaves the engine usable: its ticket is done, and every wait for it rethrows.
/// Thread-safe. Destruction completes the copies that were submitted.
class AsyncCopyEngine final : public CopyEngine {
 public:
  /// Throws std::system_error if the system refuses a thread.
  explicit AsyncCopyEngine(AsyncCopyOptions options = {});
  ~AsyncCopyEngine() override;

  /// Throws InvalidArgument if the spans differ in size or overlap.
  [[nodiscard]] CopyTicket submit(const CopyRequest& request) override;
  /// Waits for the copy. Throws InvalidArgument for a ticket that was never given out; so does
  /// done().
  void wait(CopyTicket ticket) override;
  [[nodiscard]] bool done(CopyTicket ticket) override;
  [[nodiscard]] bool asynchronous() const noexcept override { return true; }

 private:
  using Clock = std::chrono::steady_clock;

  void work(const std::stop_token& stop, std::size_t direction);
  void copy(const CopyRequest& request, Clock::time_point* link_free) const;

  const AsyncCopyOptions options_;
  Mutex mutex_;
  std::condition_variable_any submitted_;
  std::condition_variable completed_;
  CopyTickets tickets_ CASTOR_GUARDED_BY(mutex_);
  // Copies that the worker has not taken yet.
  std::array<std::deque<CopyRequest>, 2> queues_ CASTOR_GUARDED_BY(mutex_);
  // Last: their destructors stop and join them while everything above is still alive.
  std::array<std::jthread, 2> workers_;
};

}  // namespace castor
