#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/chunk_layout.h"
#include "core/copy_engine.h"
#include "core/param_binder.h"
#include "core/param_store.h"
#include "core/payload.h"
#include "core/pending_updates.h"
#include "core/placement.h"
#include "core/residency.h"
#include "core/tensor_state.h"
#include "core/timeline.h"

namespace castor {

/// Counts of bytes moved and decisions taken, since construction.
struct TransferCounts {
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  std::uint64_t fetches = 0;
  std::uint64_t evictions = 0;
  std::uint64_t promotions = 0;
  std::uint64_t demotions = 0;
};

/// Owner of every chunk's payloads and device slot. Moves parameters between the two, or chunks
/// with all their payloads, as its account of them (Residency) says. The runtime decides when to
/// move. Not thread-safe: the runtime's mutex guards it.
/// Invariants:
///   - a pinned chunk is resident;
///   - a parameter is bound to readable memory at all times (device slot when resident, host
///     storage otherwise), unless a ParamStore has it;
///   - a write made by user code through either is never lost;
///   - device bytes are reserved before they are used.
class ChunkManager {
 public:
  /// Allocates the kParam storage of every chunk, in the order of the chunks. The storage is on the
  /// device tier for Placement::kDevice. Otherwise it is in `param_host` for chunks that ranks
  /// update in shards (ChunkSpec::updated_in_shards), and on the host tier for the others. nullptr:
  /// on the host tier for all. `copies` is needed where other processes use memory of `param_host`,
  /// or of another tier of add_payload. Chunks that `store` has get no storage; nullptr: there are
  /// none.
  /// Throws OutOfMemory. `layout`, `engine`, `binder` and `store` outlive the manager.
  ChunkManager(const ChunkLayout& layout, const std::vector<Placement>& placements,
               std::shared_ptr<MemoryTier> device, std::shared_ptr<MemoryTier> host,
               CopyEngine& engine, ParamBinder& binder, ParamStore* store = nullptr,
               const std::shared_ptr<MemoryTier>& param_host = nullptr,
               std::shared_ptr<HostBlocks> copies = nullptr);
  ChunkManager(const ChunkManager&) = delete;
  ChunkManager& operator=(const ChunkManager&) = delete;
  /// Sends every chunk to its host storage, with user writes, and binds every parameter there. A
  /// write-back that fails now is lost: the host storage stays as it was. Promoted chunks stay
  /// where they are, in memory that their payloads own.
  ~ChunkManager();

  /// Records transfers in `recorder` from now on; nullptr: nowhere. Borrowed.
  void record_into(TimelineRecorder* recorder) noexcept { recorder_ = recorder; }

  /// Makes reads of host storage wait for the chunk's update in `updates` from now on; nullptr:
  /// there are no updates. Borrowed.
  void follow(PendingUpdates* updates) noexcept { updates_ = updates; }
  /// Sets a function that is called before a promoted chunk leaves the device, and returns when
  /// nobody else uses its payloads there; nullptr: nobody does.
  void await_before_demotion(std::function<void(ChunkId)> await) {
    await_users_ = std::move(await);
  }

  /// Adds a payload of `bytes` to the chunk: on the device for Placement::kDevice, else in `host`
  /// (nullptr: the host tier). Parameters and gradients that the ParamStore has take no memory.
  /// Errors call the payload `name`, or by its kind. Throws OutOfMemory; UsageError if the chunk
  /// has one of the kind.
  void add_payload(ChunkId chunk, PayloadKind kind, std::size_t bytes, std::string_view name = {},
                   const std::shared_ptr<MemoryTier>& host = nullptr);
  /// Makes ParamBinder::before_write_back see what user code writes to the chunk while it is
  /// promoted, too. Called before the chunk is promoted.
  void follow_writes(ChunkId chunk) { slots_[index(chunk)].writes_followed = true; }
  /// Returns the chunk's payload of that kind; nullptr when it has none.
  [[nodiscard]] const std::shared_ptr<Payload>& payload(ChunkId chunk, PayloadKind kind) const;

  [[nodiscard]] const Residency& residency() const noexcept { return residency_; }
  [[nodiscard]] Placement placement(ChunkId chunk) const { return residency_.placement(chunk); }
  [[nodiscard]] bool resident(ChunkId chunk) const { return residency_.resident(chunk); }
  /// Returns whether the chunk's parameters are bound to memory on the device.
  [[nodiscard]] bool bound(ChunkId chunk) const {
    return residency_.on_device(chunk) || slots_[index(chunk)].bound;
  }
  [[nodiscard]] std::uint32_t pins(ChunkId chunk) const { return residency_.pins(chunk); }

  /// Starts the copy of a chunk to the device, for which the caller has made room. Throws
  /// OutOfMemory when there is none. No effect on a resident chunk.
  void fetch(ChunkId chunk);
  /// Same as fetch, but returns false when there is no room: non-model memory of another thread may
  /// have taken the room that was made. Throws OutOfMemory only when the arena refuses.
  [[nodiscard]] bool try_fetch(ChunkId chunk);
  /// Pins a resident chunk, waits for its update and copy, and binds its parameters to the slot.
  /// Throws UsageError if the chunk is not resident. Rethrows a failure of its copy, after which
  /// the chunk is not resident any more, and a failure of its update.
  [[nodiscard]] Pin pin(ChunkId chunk);
  /// Pins a chunk that is bound to the device for an operator of `stream`, so that none of its
  /// payloads moves. Throws UsageError if the chunk is not bound there.
  [[nodiscard]] Pin pin_for_operator(ChunkId chunk, StreamId stream);
  /// Returns the number of pins that operators have now, over all chunks.
  [[nodiscard]] std::size_t num_operator_pins() const noexcept {
    return residency_.num_operator_pins();
  }
  /// Sends a chunk to its host storage; user writes on the device are copied back. Throws
  /// UsageError if the chunk is pinned, not resident or in use (TensorState::kCompute). Rethrows a
  /// failure of the copy back; the chunk then stays on the device, and evict may be called again.
  void evict(ChunkId chunk);
  /// Evicts chunks in order until `bytes` fit the device budget and slots take at most `cap_bytes`
  /// with them. Only chunks whose next use is `horizon` or later leave. Returns whether `bytes` fit
  /// the budget: the cap is a wish, the budget is not.
  bool make_room(std::size_t bytes, std::size_t cap_bytes, std::uint64_t horizon = 0);
  /// Frees unused slots until those that are kept take at most `keep_bytes`.
  void trim_slots(std::size_t keep_bytes) noexcept { device_->trim(keep_bytes); }
  [[nodiscard]] bool update_pending(ChunkId chunk) const {
    return updates_ != nullptr && updates_->pending(chunk);
  }
  /// Returns whether a fetch of the chunk would block the caller now, until its update is over or
  /// until its parameters are in host memory.
  [[nodiscard]] bool fetch_blocks(ChunkId chunk) const;
  /// Returns whether the ParamStore has the chunk's parameters: they have no storage in memory.
  [[nodiscard]] bool stored(ChunkId chunk) const {
    return store_ != nullptr && store_->stored(chunk);
  }
  /// Returns whether the ParamStore has the chunk's gradients.
  [[nodiscard]] bool gradients_stored(ChunkId chunk) const {
    return store_ != nullptr && store_->gradients_stored(chunk);
  }
  /// Returns the ParamStore; nullptr: all host storage is in memory.
  [[nodiscard]] ParamStore* store() const noexcept { return store_; }
  /// Gives this process a copy of the chunk's parameters in host storage, which it is about to
  /// write, where other processes use that storage too (Payload::take_copy). No effect on a
  /// promoted chunk. Throws OutOfMemory.
  void take_copy(ChunkId chunk);
  /// Goes back to the parameters in the storage that processes share. Requires that nothing reads
  /// the copy.
  void drop_copy(ChunkId chunk) noexcept;
  /// Carries user writes to a promoted chunk over to its masters, as a write-back does with those
  /// to a slot. Called before the chunk's update. No effect on other chunks.
  void settle_writes(ChunkId chunk);
  /// Sends every chunk to its host storage. Requires that nothing is pinned. Not counted as
  /// evictions.
  void move_to_host();

  /// Makes a streamed chunk resident on the device for good, with every payload: its placement is
  /// kDevice until it is demoted. Its host storage stays allocated for the way back. Returns false,
  /// and changes nothing, when there is no room for on_device_bytes. Throws UsageError unless the
  /// chunk is in host memory, in no slot, and no update of it is pending. Rethrows a copy's
  /// failure; the chunk is then still in host storage.
  [[nodiscard]] bool try_promote(ChunkId chunk);
  /// Makes a promoted chunk a streamed one. Its payloads go to host storage, and its parameters
  /// stay where they are, as a slot that may be pinned, in use, or evicted. Waits for its update,
  /// and for await_before_demotion. Takes no memory, except for copies of payloads whose host
  /// storage processes share. Throws OutOfMemory for these. Throws UsageError if the chunk is not
  /// promoted, or if an operator pins it. Rethrows a copy's failure; the chunk is where it was
  /// then.
  void demote(ChunkId chunk);
  /// Demotes the promoted chunk with the latest next use: among those that are not pinned, or else
  /// among those that only modules pin. Returns false when there is none.
  bool demote_one();
  [[nodiscard]] bool promoted(ChunkId chunk) const { return residency_.promoted(chunk); }
  /// Returns the device bytes that the chunk takes, or would take, with all its payloads there for
  /// good.
  [[nodiscard]] std::size_t on_device_bytes(ChunkId chunk) const;
  /// Returns the device bytes of the chunks that are promoted now.
  [[nodiscard]] std::size_t resident_bytes() const noexcept { return resident_bytes_; }

  /// Sets the chunk's next use, which orders evictions once the chunk is unpinned.
  void set_next_use(ChunkId chunk, std::uint64_t next_use) {
    residency_.set_next_use(chunk, next_use);
  }

  [[nodiscard]] TensorState state(ParamId param) const { return states_[index(param)]; }
  /// Sets a parameter's state. Throws UsageError on an edge that the transition table lacks. No
  /// effect if the parameter has that state already.
  void set_state(ParamId param, TensorState state);

  /// Returns the device bytes of slots that come and go (kStream, kKeep).
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
    std::unique_ptr<ParamLease> source;  // lease of a stored chunk while it is copied in
    bool bound = false;
    bool writes_followed = false;
    // The parameters of a promoted chunk at the first use since the last update, where its writes
    // are followed. A comparison with them shows what user code has written since.
    Block before;
    bool before_taken = false;
    PayloadSet payloads;
  };

  void copy_in(ChunkId chunk);
  void release_source(Slot& slot) noexcept;
  void bind_to_host(ChunkId chunk) noexcept;
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
  std::shared_ptr<HostBlocks> copies_;  // nullptr: no host storage needs any
  CopyEngine& engine_;
  ParamBinder& binder_;
  ParamStore* const store_;
  Residency residency_;
  std::vector<Slot> slots_;
  std::vector<TensorState> states_;
  std::size_t resident_bytes_ = 0;
  std::size_t num_sources_ = 0;  // slots that have a source
  TransferCounts counts_;
  TimelineRecorder* recorder_ = nullptr;
  PendingUpdates* updates_ = nullptr;
  std::function<void(ChunkId)> await_users_;
};

}  // namespace castor
