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

/// Reduces chunks of gradients beside the backward pass that completes them, on a thread of its
/// own. So a rank does not keep gradients that the others could have had already.
///
/// Ranks take the chunks in one order, and compare before each whether all of them have completed
/// it; if so, it is reduced. A rank says that it will not soon complete a chunk when its pass went
/// on to chunks behind it, or waits for one of those. It says so too when its pass is over because
/// it skipped an expert. The chunk is then left to the end of the pass. So no rank waits for one
/// that does other things, and all ranks reduce the same chunks.
///
/// One thread at a time calls complete(), the waits and end_pass(). After a failure, which they
/// rethrow, nothing is reduced any more.
class BackwardReductions {
 public:
  using Reduce = std::function<void(ChunkId)>;
  enum class Progress : std::uint8_t { kMade, kNone, kNobodysTurn };

  /// Starts the thread. `order` is the order in which chunks are expected to be complete, the same
  /// on every rank. `ranks` are used for nothing else. `reduce` runs on every rank, for one chunk
  /// after the other; the objects that it uses outlive this. Throws std::system_error if the system
  /// refuses a thread.
  BackwardReductions(std::shared_ptr<Collectives> ranks, std::size_t num_chunks,
                     std::vector<ChunkId> order, Reduce reduce);
  /// Gives up a pass that is under way, on every rank.
  ~BackwardReductions();
  BackwardReductions(const BackwardReductions&) = delete;
  BackwardReductions& operator=(const BackwardReductions&) = delete;

  /// Reports that this rank has all of the chunk's gradients, and leaves them alone until wait()
  /// returns. Returns false where the chunk was not among those expected, or is left to the end of
  /// the pass already.
  [[nodiscard]] bool complete(ChunkId chunk);
  /// Waits until a completed chunk has been reduced or is left to the end of the pass.
  void wait(ChunkId chunk);
  /// Waits for the other ranks to take a chunk that is next and complete here. Returns whether they
  /// took it; kNobodysTurn at once where there is no such chunk, and so nobody to wait for.
  [[nodiscard]] Progress wait_for_others(std::chrono::milliseconds patience);
  /// Waits until the next completed chunk has been reduced or is left to the end of the pass,
  /// however late the other ranks are. Returns false at once where no completed chunk is left.
  [[nodiscard]] bool wait_for_next();
  /// Returns the number of chunks of the pass that have been reduced or left to its end.
  [[nodiscard]] std::size_t num_taken() const {
    const MutexLock lock(mutex_);
    return next_;
  }
  /// Returns the number of completed chunks that have not been taken.
  [[nodiscard]] std::size_t num_waiting() const {
    const MutexLock lock(mutex_);
    return num_waiting_;
  }
  /// Returns whether ranks are reducing chunks of a pass, or wait for each other to.
  [[nodiscard]] bool under_way() const;
  /// Ends the pass, which is over on every rank, or will be. Returns per chunk whether it has been
  /// reduced in the pass.
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
  std::condition_variable_any changed_;  // notified by the passes' thread
  std::condition_variable taken_;
  // Per chunk; always kLeft for chunks outside order_.
  std::vector<State> states_ CASTOR_GUARDED_BY(mutex_);
  std::size_t next_ CASTOR_GUARDED_BY(mutex_) = 0;  // in order_
  std::size_t num_waiting_ CASTOR_GUARDED_BY(mutex_) = 0;
  bool under_way_ CASTOR_GUARDED_BY(mutex_) = false;
  bool over_ CASTOR_GUARDED_BY(mutex_) = false;               // this rank's pass is over
  std::optional<ChunkId> awaited_ CASTOR_GUARDED_BY(mutex_);  // chunk that a pass waits for
  std::exception_ptr failure_ CASTOR_GUARDED_BY(mutex_);
  // Last: its destructor joins while everything above is still alive.
  std::jthread worker_;
};

}  // namespace castor
