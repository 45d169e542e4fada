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

/// Updates one chunk's home; may throw. `next`: the chunks whose updates will follow, as it looks
/// now, a few of them.
using UpdateFunction = std::function<void(std::span<const ChunkId> next)>;

/// What an UpdateQueue runs first.
enum class UpdateOrder : std::uint8_t {
  kWanted,     ///< a chunk that somebody waits for
  kSubmitted,  ///< what was submitted first: on several ranks all update in the same order
};

/// Runs chunk updates one after the other on a thread of its own, in the order of submission but
/// for what UpdateOrder says. An update may spread over an Executor.
///
/// The first update that fails stops the queue: the rest is dropped, since half a step is worth
/// nothing, and every later wait, drain and submit rethrows the failure. Thread-safe. Destruction
/// completes what was submitted.
class UpdateQueue final : public PendingUpdates {
 public:
  /// Throws std::system_error if the system refuses a thread.
  explicit UpdateQueue(std::size_t num_chunks, UpdateOrder order = UpdateOrder::kWanted);
  ~UpdateQueue() override;

  /// The chunk's update will run. Throws UsageError if one is pending already.
  void submit(ChunkId chunk, UpdateFunction update);
  [[nodiscard]] bool pending(ChunkId chunk) const noexcept override;
  void wait(ChunkId chunk) override;
  /// Returns when every update is over.
  void drain();
  /// As drain, but forgets a failure instead: updates may be submitted again.
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
