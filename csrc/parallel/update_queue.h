#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "core/mutex.h"
#include "core/pending_updates.h"

namespace castor {

/// Updates the host storage of one chunk; may throw. `next` names a few chunks whose updates will
/// probably follow.
using UpdateFunction = std::function<void(std::span<const ChunkId> next)>;

/// Order in which an UpdateQueue runs updates.
enum class UpdateOrder : std::uint8_t {
  kWanted,     ///< a chunk that somebody waits for goes first
  kSubmitted,  ///< order of submission, so that several ranks update in the same order
};

/// Runs chunk updates one after the other on a thread of its own, in the order of submission unless
/// UpdateOrder says otherwise. An update may spread over an Executor.
///
/// The first update that fails stops the queue: the rest is dropped, since half a step is worth
/// nothing, and every later wait, drain and submit rethrows the failure. Thread-safe. Destruction
/// completes the updates that were submitted.
class UpdateQueue final : public PendingUpdates {
 public:
  /// Throws std::system_error if the system refuses a thread.
  explicit UpdateQueue(std::size_t num_chunks, UpdateOrder order = UpdateOrder::kWanted);
  ~UpdateQueue() override;

  /// Queues the chunk's update. Throws UsageError if an update of the chunk is pending already.
  void submit(ChunkId chunk, UpdateFunction update);
  [[nodiscard]] bool pending(ChunkId chunk) const noexcept override;
  void wait(ChunkId chunk) override;
  /// Waits until every update is over.
  void drain();
  /// Same as drain(), but forgets a failure instead of rethrowing it: updates may be submitted
  /// again.
  void abandon();

 private:
  struct Update {
    ChunkId chunk;
    UpdateFunction run;
  };

  void work(const std::stop_token& stop);
  void rethrow_failure() const CASTOR_REQUIRES(mutex_);

  const UpdateOrder order_;
  mutable Mutex mutex_;
  std::condition_variable_any submitted_;
  std::condition_variable completed_;
  std::deque<Update> updates_ CASTOR_GUARDED_BY(mutex_);  // not taken by the worker yet
  std::vector<bool> pending_ CASTOR_GUARDED_BY(mutex_);   // per chunk
  std::size_t num_pending_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ CASTOR_GUARDED_BY(mutex_);
  // Last: its destructor stops and joins while everything above is still alive.
  std::jthread worker_;
};

}  // namespace castor
