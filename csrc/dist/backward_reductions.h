#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "core/collectives.h"
#include "core/ids.h"
#include "core/mutex.h"

namespace castor {

/// Brings chunks together beside the backward pass that completes them, on a thread of its own, so
/// that a rank does not keep gradients that the others could have had already.
///
/// Ranks take the chunks in one order, and agree before each: it is reduced where every rank has
/// completed it. A rank that will not soon (its pass went on to chunks behind it, waits for one
/// of them, or is over: it skipped an expert) says so, and the chunk is left to the end of the
/// pass. So no rank waits for one that does other things, and what is reduced is the same on all.
///
/// complete(), wait() and end_pass() are called by one thread at a time. After a failure, which
/// they rethrow, nothing is reduced any more.
class BackwardReductions {
 public:
  using Reduce = std::function<void(ChunkId)>;
  enum class Progress : std::uint8_t { kMade, kNone, kNobodysTurn };

  /// `order`: in which chunks are expected to be complete, the same on every rank. `ranks`: for
  /// nothing else. `reduce` runs on every rank, of one chunk after the other; what it uses outlives
  /// this. Throws std::system_error if the system refuses a thread.
  BackwardReductions(std::shared_ptr<Collectives> ranks, std::size_t num_chunks,
                     std::vector<ChunkId> order, Reduce reduce);
  /// A pass that is under way is given up, on every rank.
  ~BackwardReductions();
  BackwardReductions(const BackwardReductions&) = delete;
  BackwardReductions& operator=(const BackwardReductions&) = delete;

  /// This rank has all of the chunk's gradients, and leaves them alone until wait() returns. False
  /// where the chunk was not among those expected, or is left to the end of the pass already.
  [[nodiscard]] bool complete(ChunkId chunk);
  /// Returns when a completed chunk has been reduced or is left to the end of the pass.
  void wait(ChunkId chunk);
  /// Waits for the other ranks to take a chunk that is next and complete here: whether they did.
  /// At once where there is none, and nobody to wait for.
  [[nodiscard]] Progress wait_for_others(std::chrono::milliseconds patience);
  /// Completed chunks that have not been taken.
  [[nodiscard]] std::size_t num_waiting() const {
    const MutexLock lock(mutex_);
    return num_waiting_;
  }
  /// Every rank's pass is over, or will be: returns which chunks have been reduced in it.
  [[nodiscard]] std::vector<bool> end_pass();

 private:
  enum class State : std::uint8_t { kAwaited, kComplete, kReduced, kLeft };

  void work(const std::stop_token& stop);
  [[nodiscard]] bool decided() const CASTOR_REQUIRES(mutex_);
  void rethrow_failure() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] State& state(ChunkId chunk) CASTOR_REQUIRES(mutex_) {
    return states_[index(chunk)];
  }

  const std::shared_ptr<Collectives> ranks_;
  const std::vector<ChunkId> order_;
  const Reduce reduce_;
  mutable Mutex mutex_;
  std::condition_variable_any changed_;  // by the passes' thread
  std::condition_variable taken_;
  std::vector<State> states_ CASTOR_GUARDED_BY(mutex_);  // per chunk; of others always kLeft
  std::size_t next_ CASTOR_GUARDED_BY(mutex_) = 0;       // in order_
  std::size_t num_waiting_ CASTOR_GUARDED_BY(mutex_) = 0;
  bool under_way_ CASTOR_GUARDED_BY(mutex_) = false;
  bool over_ CASTOR_GUARDED_BY(mutex_) = false;               // this rank's pass
  std::optional<ChunkId> awaited_ CASTOR_GUARDED_BY(mutex_);  // by a pass that stands meanwhile
  std::exception_ptr failure_ CASTOR_GUARDED_BY(mutex_);
  // Last: its destructor joins while everything above is still alive.
  std::jthread worker_;
};

}  // namespace castor
