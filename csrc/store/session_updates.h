#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/chunk_reads.h"
#include "core/run_load.h"
#include "core/runtime.h"
#include "store/chunk_copies.h"
#include "store/chunk_gradients.h"
#include "store/chunk_updates.h"
#include "store/device_updates.h"
#include "store/operator_gate.h"
#include "store/run_integrity.h"
#include "store/session_chunks.h"
#include "store/session_ranks.h"
#include "store/state_store.h"
#include "store/updater.h"

namespace castor {

/// Runtime, optimizer states and updates of one session, its communication with other ranks, and
/// the saves that read it beside the training. Owned by the session. The members say which threads
/// may call them.
class SessionUpdates {
 public:
  /// Objects of the session that the updates work on, and what they ask the session. All outlive
  /// this.
  struct Parts {
    const SessionMemory& memory;
    SessionChunks& chunks;
    ChunkGradients& gradients;
    OperatorGate& gate;
    std::function<float&(ParamId)> steps;   ///< see Updater::Parts
    std::function<void(ParamId)> replaced;  ///< see Updater::Parts
    /// Returns whether somebody has another tensor over the chunk's memory, which the gate does not
    /// watch.
    std::function<bool(ChunkId)> aliased;
    /// Returns whether a parameter of the chunk has other memory than the chunk's.
    std::function<bool(ChunkId)> rebound;
  };
  /// Adds the optimizer states of every chunk, and passes a barrier of the ranks. Throws
  /// OutOfMemory, and as SessionRanks.
  SessionUpdates(Parts parts, const SessionOptions& options);
  SessionUpdates(const SessionUpdates&) = delete;
  SessionUpdates& operator=(const SessionUpdates&) = delete;
  /// Ends what waits for other ranks, saves and updates. No update is under way on return. Called
  /// when the session begins to end.
  void end() noexcept;
  /// Ends the communication with other ranks, then the runtime. Only the states may be used
  /// afterwards. Called after end().
  void leave() noexcept;

  [[nodiscard]] Runtime& runtime() const noexcept { return *runtime_; }
  [[nodiscard]] StateStore& states() noexcept { return states_; }
  [[nodiscard]] const StateStore& states() const noexcept { return states_; }
  [[nodiscard]] ChunkUpdates& chunk_updates() noexcept { return updates_; }
  [[nodiscard]] const ChunkUpdates& chunk_updates() const noexcept { return updates_; }
  [[nodiscard]] Updater& updater() noexcept { return updater_; }
  /// Returns the updates of chunks in host memory that run on the device; nullptr: none do.
  [[nodiscard]] const DeviceUpdates* device_updates() const noexcept {
    return device_updates_.get();
  }
  [[nodiscard]] ChunkReads& reads() noexcept { return reads_; }
  /// Returns the copies of chunks that a save reads.
  [[nodiscard]] ChunkCopies& copies() noexcept { return copies_; }
  /// Returns the communication with the other ranks; nullptr where this process is alone.
  [[nodiscard]] SessionRanks* ranks() const noexcept { return ranks_.get(); }

  /// Sets whether the gradients of the following passes become the ranks' mean at the end of each
  /// pass, or all at the next step. Returns the previous setting; true where this process is alone.
  bool synchronise(bool on) { return ranks_ == nullptr || ranks_->gradients().synchronise(on); }

  /// Returns whether weights and states are those of one step.
  [[nodiscard]] bool consistent() const { return integrity_.consistent() && !torn(); }
  /// Throws UsageError unless consistent().
  void check_consistent();

  // Events of passes and steps, in the order of a step.
  /// Notes that another gradient of the parameter arrives. Throws UsageError where its chunk is
  /// updated already.
  void arriving(ParamId param);
  /// Notes that all gradients of the chunk have come.
  void completed(ChunkId chunk);
  /// Prepares for an operator of this rank's that writes gradients of the chunk.
  void writing(ChunkId chunk);
  /// Waits until the device has read the weights in storage that other ranks are about to write: by
  /// copies, and by kernels. Comes before the ranks' check of a step or a load.
  void await_reads_of_ranks();
  /// Lets the gradients be closed: every chunk goes to its host storage, and nothing is under way
  /// that reads weights or brings gradients.
  void begin_update();
  /// Adds the squares of sharded gradients, at each parameter's place.
  void measure_shards(std::span<double> squares) const {
    ranks_->gradients().measure_shards(squares);
  }
  void finish_step();
  /// Decides, where that is due after a step, which chunks are resident on the device.
  void place_chunks_again();

  /// Begins a load, and forgets a step that stopped in the middle. begin_load comes before the
  /// session takes up what users have given its parameters, loading() after.
  void begin_load(RunLoad load);
  void loading(RunLoad load);
  void loaded(RunLoad load) { integrity_.loaded(load); }
  /// Lets each rank read again what others keep. Every rank calls it once it has replaced its
  /// weights.
  void share_weights();

  /// Waits until nothing uses the memory of the gate's group.
  void settle_group(std::size_t group);
  /// Returns whether a save reads the gate's group where it is. Gradients are no part of a save.
  [[nodiscard]] bool read_by_save(std::size_t group) const {
    return group < num_chunks() && reads_.reading(ChunkId{static_cast<std::uint32_t>(group)});
  }
  /// Brings what an operator of the calling thread uses into memory, and keeps it there until the
  /// returned object goes. `owner` goes last.
  [[nodiscard]] std::shared_ptr<void> visit(std::shared_ptr<void> owner,
                                            std::span<const OperatorUse> uses);

 private:
  [[nodiscard]] bool torn() const noexcept;  ///< Whether a write to NVMe failed.
  void note_torn_payloads();
  void end_reads_of_shards();
  [[nodiscard]] std::size_t num_chunks() const noexcept { return parts_.memory.num_chunks(); }

  const Parts parts_;
  StateStore states_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<SessionRanks> ranks_;  // nullptr: one process
  RunIntegrity integrity_;
  ChunkReads reads_;
  ChunkCopies copies_;
  std::unique_ptr<DeviceUpdates> device_updates_;  // nullptr: none
  ChunkUpdates updates_;
  Updater updater_;
};

}  // namespace castor
