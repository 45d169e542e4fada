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

/// Copy engine of a GPU: one stream from host to device and one back, beside the streams that
/// compute. Streams are named by cuda::stream_id and belong to the device. submit() enqueues and
/// returns. These rules order the copies:
///
/// - A copy starts when the stream CopyRequest::behind has done what it had been given before
///   submit(). A copy to the device whose target was given to release() starts instead when the
///   stream named there has done what it had been given then.
/// - Copies of the two directions that touch the same bytes run in the order of submission.
/// - If something still writes a copy's source (CopyRequest::await_source), a thread of the engine
///   waits for that and then hands the copy to CUDA. The thread then hands over the copies behind
///   it, in order. All the same, submit() settles which compute they are behind.
/// - order() makes a stream wait. It returns at once, or when the copy has been handed to CUDA.
/// - The host calls wait() before it reads the target of a copy to the host, and before it writes,
///   or gives back, the source of a copy to the device.
///
/// The host's side must be page-locked, the device's side memory of `device`. A failure of the
/// device (an illegal address in any kernel included) spoils its context: every later call throws.
/// A copy that was refused after submit(), or whose await_source threw, counts as done, and every
/// wait for it rethrows. Thread-safe. Destruction waits for every copy in flight.
class StreamCopyEngine final : public CopyEngine {
 public:
  /// Throws CudaError if there is no such device.
  explicit StreamCopyEngine(int device);
  ~StreamCopyEngine() override;
  StreamCopyEngine(const StreamCopyEngine&) = delete;
  StreamCopyEngine& operator=(const StreamCopyEngine&) = delete;

  /// Throws InvalidArgument if the spans differ in size, overlap or are not the memory they must
  /// be, CudaError if CUDA refuses. Nothing is under way then.
  [[nodiscard]] CopyTicket submit(const CopyRequest& request) override;
  /// wait(), order() and done() throw InvalidArgument for a ticket that was never given out, and
  /// CudaError for a failure.
  void wait(CopyTicket ticket) override;
  void order(CopyTicket ticket, StreamId stream) override;
  [[nodiscard]] bool done(CopyTicket ticket) override;
  /// Waits for every copy to the device that reads these bytes, except those that are not enqueued
  /// yet: they wait for their source. Throws CudaError.
  void synchronize_readers(std::span<const std::byte> source);
  [[nodiscard]] bool asynchronous() const noexcept override { return true; }
  [[nodiscard]] int device() const noexcept { return device_; }

  /// Declares that `stream` has been given all that it does with these bytes of the device. The
  /// next copy into them need not wait for what the stream is given later.
  void release(std::span<const std::byte> slot, StreamId stream);
  /// Takes release() back. Required before released memory goes to an allocator that may lend it to
  /// others in between: release() has not seen what these submit.
  void forget(std::span<const std::byte> slot);

 private:
  struct Copy {
    CopyRequest request;
    std::uint64_t order = 0;          // number among those of both directions
    std::vector<cudaEvent_t> behind;  // events that it has to wait for
    cudaEvent_t event = nullptr;      // recorded behind it, once it is enqueued
    bool enqueued = false;            // or failed
  };

  struct Lane {
    cudaStream_t stream = nullptr;
    std::deque<Copy> pending;  // copies not done, in order; elements stay where they are
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
  /// Returns the last copy of the other direction before `copy` that touches the same bytes and is
  /// neither done nor failed.
  [[nodiscard]] const Copy* conflict(const Copy& copy, std::size_t direction);
  void enqueue(Copy& copy, std::size_t direction);
  void work(const std::stop_token& stop, std::size_t direction);
  void forget_events(Copy& copy) noexcept;
  [[nodiscard]] std::uint64_t num_submitted(std::size_t direction) const noexcept {
    return tickets_.num_done(direction) + lanes_[direction].pending.size();
  }
  /// Returns the copy, or nullptr if it is done. Rethrows its failure.
  [[nodiscard]] const Copy* find(CopyNumber copy);
  /// Waits until the copy has been handed to CUDA; returns as find() does.
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
