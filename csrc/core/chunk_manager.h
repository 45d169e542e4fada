#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/chunk_layout.h"
#include "core/copy_engine.h"
#include "core/home_store.h"
#include "core/param_binder.h"
#include "core/payload.h"
#include "core/pending_updates.h"
#include "core/placement.h"
#include "core/residency.h"
#include "core/tensor_state.h"
#include "core/timeline.h"

namespace castor {

/// Bytes moved and decisions taken since construction.
struct TransferCounts {
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  std::uint64_t fetches = 0;
  std::uint64_t evictions = 0;
  std::uint64_t promotions = 0;
  std::uint64_t demotions = 0;
};

/// Owns every chunk's payloads and device slot, and moves parameters between the two, or whole
/// chunks, as its account of them (Residency) says. Tells nobody when to move: the runtime decides.
/// Not thread-safe: the runtime's mutex guards it.
/// Invariants: a pinned chunk is resident; a parameter is bound to readable memory at every moment
/// (device slot when resident, home otherwise), unless a HomeStore has its home; a write made by
/// user code through either is never lost; device bytes are reserved before they are used.
class ChunkManager {
 public:
  /// Allocates the kParam home of every chunk: on the device tier for Placement::kDevice, else in
  /// `param_host`, in the order of the chunks (nullptr: on the host tier, as all else); none for
  /// what `homes` has (nullptr: there is none). Throws OutOfMemory. `layout`, `engine`, `binder`
  /// and `homes` outlive the manager.
  ChunkManager(const ChunkLayout& layout, const std::vector<Placement>& placements,
               std::shared_ptr<MemoryTier> device, std::shared_ptr<MemoryTier> host,
               CopyEngine& engine, ParamBinder& binder, HomeStore* homes = nullptr,
               const std::shared_ptr<MemoryTier>& param_host = nullptr);
  ChunkManager(const ChunkManager&) = delete;
  ChunkManager& operator=(const ChunkManager&) = delete;
  /// Sends every chunk home, user writes with it, and binds every parameter there. A write-back
  /// that fails now is lost: the home stays as it was. Promoted chunks stay where they are, in
  /// memory that their payloads own.
  ~ChunkManager();

  /// Transfers are recorded there from now on; nullptr: nowhere. Borrowed.
  void record_into(TimelineRecorder* recorder) noexcept { recorder_ = recorder; }

  /// Homes are read only after their updates from now on; nullptr: there are none. Borrowed.
  void follow(PendingUpdates* updates) noexcept { updates_ = updates; }

  /// Adds a payload of `bytes` at the chunk's home tier, on the host in `host` (nullptr: the host
  /// tier); errors call it `name`, or by its kind. Throws OutOfMemory; UsageError if present.
  void add_payload(ChunkId chunk, PayloadKind kind, std::size_t bytes, std::string_view name = {},
                   const std::shared_ptr<MemoryTier>& host = nullptr);
  /// From now on ParamBinder::before_write_back is told what user code wrote to the chunk also
  /// where it is promoted. Before it is.
  void follow_writes(ChunkId chunk) { slots_[index(chunk)].writes_followed = true; }
  /// nullptr when the chunk has none of that kind.
  [[nodiscard]] const std::shared_ptr<Payload>& payload(ChunkId chunk, PayloadKind kind) const;

  [[nodiscard]] const Residency& residency() const noexcept { return residency_; }
  [[nodiscard]] Placement placement(ChunkId chunk) const { return residency_.placement(chunk); }
  [[nodiscard]] bool resident(ChunkId chunk) const { return residency_.resident(chunk); }
  /// Whether the chunk's parameters are bound to memory on the device.
  [[nodiscard]] bool bound(ChunkId chunk) const {
    return residency_.on_device(chunk) || slots_[index(chunk)].bound;
  }
  [[nodiscard]] std::uint32_t pins(ChunkId chunk) const { return residency_.pins(chunk); }

  /// Starts bringing a chunk in. The caller has made room: throws OutOfMemory when there is none.
  /// No effect on a resident chunk.
  void fetch(ChunkId chunk);
  /// As fetch, but returns false when there is no room: another thread's non-model memory may have
  /// taken what was made. Throws OutOfMemory only when the arena refuses.
  [[nodiscard]] bool try_fetch(ChunkId chunk);
  /// Pins a resident chunk, waits for its update and copy, and binds its parameters to the slot.
  /// Throws UsageError if it is not resident. Where its copy failed, rethrows that, and the chunk
  /// is not resident any more; where its update failed, rethrows that.
  [[nodiscard]] Pin pin(ChunkId chunk);
  /// Pins a chunk that is bound to the device for an operator of `stream`, so that none of its
  /// payloads moves either. Throws UsageError if it is not bound there.
  [[nodiscard]] Pin hold(ChunkId chunk, StreamId stream);
  /// Operators that hold any chunk now.
  [[nodiscard]] std::size_t num_holds() const noexcept { return residency_.num_holds(); }
  /// Sends a chunk home; user writes on the device are copied back. Throws UsageError if it is
  /// pinned, not resident or in use (TensorState::kCompute). When the copy back fails, rethrows
  /// that, and the chunk stays on the device; evict may be called again.
  void evict(ChunkId chunk);
  /// Evicts in order until `bytes` fit the device budget and streamed chunks stay within
  /// `cap_bytes` after adding them; only chunks whose next use is `horizon` or later.
  /// Returns whether `bytes` fit the budget: the cap is a wish, the budget is not.
  bool make_room(std::size_t bytes, std::size_t cap_bytes, std::uint64_t horizon = 0);
  /// Gives free slots back beyond `keep_bytes` of them.
  void trim_slots(std::size_t keep_bytes) noexcept { device_->trim(keep_bytes); }
  [[nodiscard]] bool update_pending(ChunkId chunk) const {
    return updates_ != nullptr && updates_->pending(chunk);
  }
  /// Whether fetching the chunk now would hold the caller up: until its update is over, or until
  /// its home is in memory.
  [[nodiscard]] bool fetch_blocks(ChunkId chunk) const;
  /// Whether the chunk's parameters have no home in memory.
  [[nodiscard]] bool stored(ChunkId chunk) const {
    return homes_ != nullptr && homes_->stored(chunk);
  }
  /// ... and neither have its gradients.
  [[nodiscard]] bool gradients_stored(ChunkId chunk) const {
    return homes_ != nullptr && homes_->gradients_stored(chunk);
  }
  /// nullptr: every home is in memory.
  [[nodiscard]] HomeStore* homes() const noexcept { return homes_; }
  /// Before its update: user writes to a promoted chunk reach its masters as those to a slot do
  /// when they are written back. No effect on others.
  void settle_writes(ChunkId chunk);
  /// Sends every chunk home. Requires that nothing is pinned. Not counted as evictions.
  void send_home();

  /// Moves every payload of a streamed chunk to the device for good: its placement is kDevice until
  /// it is demoted. Its homes stay allocated for the way back. False, and nothing happened, when
  /// there is no room for on_device_bytes. Throws UsageError unless it is at home, in memory, no
  /// update of it pending; rethrows a copy's failure, the chunk at home.
  [[nodiscard]] bool try_promote(ChunkId chunk);
  /// Makes a promoted chunk a streamed one: its payloads go home, and its parameters stay where
  /// they are, as a slot that may be pinned, in use, or evicted. Waits for its update. Takes no
  /// memory. Throws UsageError if it is not promoted, or held by an operator; rethrows a copy's
  /// failure, nothing changed.
  void demote(ChunkId chunk);
  /// Demotes the promoted chunk that is used last of those not pinned, or else of those that
  /// modules pin, but none that an operator holds. False when there is none.
  bool demote_one();
  [[nodiscard]] bool promoted(ChunkId chunk) const { return residency_.promoted(chunk); }
  /// Device bytes that the chunk takes, or would take, with all its payloads there for good.
  [[nodiscard]] std::size_t on_device_bytes(ChunkId chunk) const;
  /// Of the chunks that are promoted now.
  [[nodiscard]] std::size_t resident_bytes() const noexcept { return resident_bytes_; }

  /// When the chunk will be used next: orders evictions once it is unpinned.
  void set_next_use(ChunkId chunk, std::uint64_t next_use) {
    residency_.set_next_use(chunk, next_use);
  }

  [[nodiscard]] TensorState state(ParamId param) const { return states_[index(param)]; }
  /// Throws UsageError on an edge that the transition table lacks. A no-op on the same state.
  void set_state(ParamId param, TensorState state);

  /// Device bytes taken by slots that come and go (kStream, kKeep).
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return residency_.slot_bytes(); }
  [[nodiscard]] std::size_t pinned_bytes() const noexcept { return residency_.pinned_bytes(); }
  [[nodiscard]] const TransferCounts& counts() const noexcept { return counts_; }
  [[nodiscard]] const ChunkLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] MemoryTier& device() noexcept { return *device_; }
  [[nodiscard]] MemoryTier& host() noexcept { return *host_; }

 private:
  struct Slot {
    Block block;
    CopyTicket ticket = CopyTicket::kNone;
    std::unique_ptr<HomeHold> source;  // of a stored chunk, while it is copied in
    bool bound = false;
    bool writes_followed = false;
    // Of a promoted chunk whose writes are followed: what the parameters were at the first use
    // since the last update, so that what user code has written since can be told.
    Block before;
    bool before_taken = false;
    PayloadSet payloads;
  };

  void copy_in(ChunkId chunk);
  void release_source(Slot& slot) noexcept;
  void bind_home(ChunkId chunk) noexcept;
  void await_copy_in(ChunkId chunk);
  void leave(ChunkId chunk);
  [[nodiscard]] std::size_t write_back(ChunkId chunk);
  [[nodiscard]] std::uint64_t clock() const { return recorder_ ? recorder_->now() : 0; }
  void drop(ChunkId chunk) noexcept;
  [[nodiscard]] std::size_t before_bytes(ChunkId chunk) const;
  void copy_and_wait(std::span<const CopyRequest> requests);

  const ChunkLayout& layout_;
  std::shared_ptr<MemoryTier> device_;
  std::shared_ptr<MemoryTier> host_;
  CopyEngine& engine_;
  ParamBinder& binder_;
  HomeStore* const homes_;
  Residency residency_;
  std::vector<Slot> slots_;
  std::vector<TensorState> states_;
  std::size_t resident_bytes_ = 0;
  std::size_t num_sources_ = 0;  // slots whose source is held
  TransferCounts counts_;
  TimelineRecorder* recorder_ = nullptr;
  PendingUpdates* updates_ = nullptr;
};

}  // namespace castor
