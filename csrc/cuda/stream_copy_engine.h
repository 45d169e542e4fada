#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "core/copy_tickets.h"
#include "cuda/event_pool.h"

namespace castor::cuda {

/// The copy engine of a GPU: one stream from host to device and one back, beside the streams that
/// compute. Streams are named by cuda::stream_id and belong to the device. submit() enqueues and
/// returns. What orders the copies:
///
/// - A copy starts when CopyRequest::behind has done what it had been given before submit(); one to
///   the device whose target was given to release() does so when that stream has done what it had
///   been given then.
/// - Copies of the two directions that touch the same bytes run in the order of submission.
/// - A copy whose source is still written (CopyRequest::await_source) is handed to CUDA by a thread
///   of the engine, once it has waited; so are the copies behind it, in order. Which compute they
///   are behind is settled in submit() all the same.
/// - order() makes a stream wait and returns at once, or when the copy has been handed to CUDA.
///   wait() is the host's: before it reads the target of a copy to the host, and before it writes,
///   or gives back, the source of a copy to the device.
///
/// The host's side must be page-locked, the device's side memory of `device`. A failure of the
/// device (an illegal address in any kernel included) spoils its context: every later call throws.
/// A copy that was refused after submit(), or whose await_source threw, is done, and every wait for
/// it rethrows. Thread-safe. Destruction waits for every copy in flight.
class StreamCopyEngine final : public CopyEngine {
 public:
  /// Throws CudaError if there is no such device.
  explicit StreamCopyEngine(int device);
  ~StreamCopyEngine() override;
  StreamCopyEngine(const StreamCopyEngine&) = delete;
  StreamCopyEngine& operator=(const StreamCopyEngine&) = delete;

  /// Throws InvalidArgument if the spans differ in size, overlap or are not the memory they must
  /// be, CudaError if CUDA refuses; nothing is under way then.
  [[nodiscard]] CopyTicket submit(const CopyRequest& request) override;
  /// These throw InvalidArgument for a ticket that was never given out, CudaError for a failure.
  void wait(CopyTicket ticket) override;
  void order(CopyTicket ticket, StreamId stream) override;
  [[nodiscard]] bool done(CopyTicket ticket) override;
  /// Of every copy to the device that reads these bytes, but for those that are not enqueued yet:
  /// they wait for their source. Throws CudaError.
  void synchronize_readers(std::span<const std::byte> source);
  [[nodiscard]] bool asynchronous() const noexcept override { return true; }
  [[nodiscard]] int device() const noexcept { return device_; }

  /// All that `stream` does with these bytes of the device has been given to it: the next copy into
  /// them need not wait for what it is given later.
  void release(std::span<const std::byte> slot, StreamId stream);
  /// Takes release() back. Required before released memory goes to an allocator that may lend it to
  /// others in between: what they submit is not in what release() saw.
  void forget(std::span<const std::byte> slot);

 private:
  struct Copy {
    CopyRequest request;
    std::uint64_t order = 0;          // among those of both directions
    std::vector<cudaEvent_t> behind;  // what it has to wait for
    cudaEvent_t event = nullptr;      // recorded behind it, once it is enqueued
    bool enqueued = false;            // or failed
  };

  struct Lane {
    cudaStream_t stream = nullptr;
    std::deque<Copy> pending;  // those not done, in order; elements stay where they are
    std::uint64_t num_enqueued = 0;
    std::jthread worker;  // started by the first copy that cannot be enqueued at once
  };

  struct Release {
    std::span<const std::byte> slot;
    cudaEvent_t event = nullptr;
  };

  void check_memory(const CopyRequest& request) const;
  [[nodiscard]] cudaEvent_t record(StreamId stream);
  [[nodiscard]] std::vector<cudaEvent_t> take_releases(std::span<const std::byte> target);
  /// The last copy of the other direction before `copy` that touches the same bytes and is neither
  /// done nor failed.
  [[nodiscard]] const Copy* conflict(const Copy& copy, std::size_t direction);
  void enqueue(Copy& copy, std::size_t direction);
  void work(const std::stop_token& stop, std::size_t direction);
  void forget_events(Copy& copy) noexcept;
  [[nodiscard]] std::uint64_t num_submitted(std::size_t direction) const noexcept {
    return tickets_.num_done(direction) + lanes_[direction].pending.size();
  }
  /// The copy, if it is not done yet. Rethrows its failure.
  [[nodiscard]] const Copy* find(CopyNumber copy);
  /// Returns when the copy has been handed to CUDA, and the copy as find() does.
  [[nodiscard]] const Copy* find_enqueued(CopyNumber copy, std::unique_lock<std::mutex>& lock);
  void reap(std::size_t direction);

  const int device_;
  std::mutex mutex_;                     // guards all below
  std::condition_variable_any changed_;  // a copy was submitted, or enqueued
  EventPool events_;
  std::uint64_t num_copies_ = 0;
  std::vector<Release> releases_;
  CopyTickets tickets_;
  std::array<Lane, 2> lanes_;
};

}  // namespace castor::cuda
