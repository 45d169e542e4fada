#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_layout.h"
#include "core/mutex.h"
#include "core/param_store.h"
#include "io/chunk_stream.h"
#include "io/nvme_tier.h"
#include "store/address_follower.h"
#include "store/session_device.h"

namespace castor {

/// Use of a chunk's parameters or gradients. Of n chunks, part i is the parameters of chunk i, and
/// part n + i its gradients.
struct WeightUse {
  std::size_t part = 0;
  bool writes = false;
};

/// Chunks whose parameters have no permanent storage in memory, and how these are used.
struct ParamStoreSpec {
  std::vector<bool> chunks;
  bool gradients = true;  ///< whether the same holds for their gradients
  /// Whether operators may change weights. If not, only steps and loads do, where the weights are.
  bool writable = true;
  std::size_t max_leases = 0;  ///< chunks; see ParamStore::max_leases
  std::string no_address;      ///< torch's message to whoever asks for it
};

/// Store of parameters and gradients on NVMe, of the chunks that the host has no room for; or of
/// parameters that are sharded over ranks (ShardedHostStorage). A window brings them into host
/// memory, part by part: to be copied to the device, to be updated, and for any operator that reads
/// them elsewhere.
///
/// Outside of operators, and of modules that run on the device, the follower of a part points
/// nowhere, and torch throws where it is asked for the address. So nobody can keep an address that
/// will be another part's.
///
/// A device that computes by itself reads and writes the window where it is. A part leaves the
/// window only after the copies and operators that were given its memory.
///
/// Owned by the session. Thread-safe, except for the binding of parameters, which only the thread
/// does that runs forward, backward and step. Calls that wait for a read may throw IoError or
/// CorruptionError.
class StoredWeights final : public ParamStore {
 public:
  /// Least number of window buffers: enough for a chunk's update (parameters and gradients), a
  /// gradient that arrives and an operator, beside one copy to the device.
  static constexpr std::size_t kLeastSlots = 5;
  /// Returns max_leases() of a window with that many buffers.
  [[nodiscard]] static constexpr std::size_t max_leases_in(std::size_t num_slots) noexcept {
    return num_slots - (kLeastSlots - 1);
  }

  /// Returns, by part, the payloads that lie on NVMe where those chunks are stored.
  [[nodiscard]] static std::vector<std::vector<PayloadSpec>> parts_of(
      const ChunkLayout& layout, const std::vector<bool>& stored);
  /// Describes chunks on NVMe: those of parts_of(layout, stored), in a stream of `num_slots`
  /// buffers.
  [[nodiscard]] static ParamStoreSpec on_nvme(std::vector<bool> stored, std::size_t num_slots);
  /// Describes chunks of which each rank has its shard.
  [[nodiscard]] static ParamStoreSpec on_ranks(std::vector<bool> sharded, std::size_t max_leases);
  /// Serves the chunks of `spec`. `stream` is over the chunks' parts, parameters first. `params`
  /// and `gradients` are told where these are. All references outlive this.
  StoredWeights(ParamStoreSpec spec, const AddressFollower& params,
                const AddressFollower& gradients, ChunkStream& stream, const SessionDevice& device);
  StoredWeights(const StoredWeights&) = delete;
  StoredWeights& operator=(const StoredWeights&) = delete;

  /// Returns what torch throws when it is asked for the address of a part that is in no memory.
  [[nodiscard]] const std::string& no_address() const noexcept { return spec_.no_address; }

  [[nodiscard]] bool stored(ChunkId chunk) const noexcept override { return stored_[index(chunk)]; }
  [[nodiscard]] bool gradients_stored(ChunkId chunk) const noexcept override {
    return spec_.gradients && stored(chunk);
  }
  /// Throws UsageError unless operators may change the chunk's weights.
  void check_writable(ChunkId chunk) const;
  [[nodiscard]] std::unique_ptr<ParamLease> lease(ChunkId chunk) override;
  [[nodiscard]] std::size_t max_leases() const noexcept override { return spec_.max_leases; }
  void announce(std::span<const ChunkId> chunks) override;
  void moved_out(ChunkId chunk) noexcept override;

  [[nodiscard]] std::size_t parameters_of(ChunkId chunk) const noexcept { return index(chunk); }
  [[nodiscard]] std::size_t gradients_of(ChunkId chunk) const noexcept {
    return stored_.size() + index(chunk);
  }
  using Pins = std::vector<ChunkStream::Pin>;
  /// Visit to some parts: while it lives, they are in memory and their followers point there.
  class Visit {
   public:
    Visit(StoredWeights& weights, std::vector<std::size_t> parts, Pins pins) noexcept
        : weights_(weights), parts_(std::move(parts)), pins_(std::move(pins)) {}
    ~Visit() {
      weights_.await_operators();
      weights_.unbind(parts_);
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    StoredWeights& weights_;
    std::vector<std::size_t> parts_;
    Pins pins_;
  };
  /// Brings different parts into memory and points their followers there. Parameters that are bound
  /// to the device must not be among them.
  [[nodiscard]] std::unique_ptr<Visit> visit(std::span<const WeightUse> uses);
  /// Brings a chunk's parameters and gradients into memory for its update; returns them in this
  /// order.
  [[nodiscard]] Pins pin_for_update(ChunkId chunk);
  /// Announces the chunks that will be updated next: starts to read them ahead.
  void announce_updates(std::span<const ChunkId> chunks);
  void forget_announced() { stream_.forget_announced(); }
  /// Calls `use` with the gradients of one chunk after the other, and reads the next ones ahead.
  void read_gradients(std::span<const ChunkId> chunks,
                      const std::function<void(ChunkId, const std::byte*)>& use);

  /// Forgets the chunk's parameters in the window, which are out of date. Requires that nobody uses
  /// them.
  void forget(ChunkId chunk) { stream_.forget(parameters_of(chunk)); }
  /// Waits until no parameters are on their way into the window.
  void await_reads() { stream_.await_reads(); }

  /// Discards the chunk's gradients: nobody will ask for them before all have been written again.
  void discard_gradients(ChunkId chunk);
  /// Discards all parameters, which are about to be replaced; gradients become zeros, if any values
  /// are lost.
  void discard_parameters();

  [[nodiscard]] bool torn() const noexcept { return stream_.torn(); }

 private:
  void await_operators() const noexcept;
  void unbind(std::span<const std::size_t> parts) noexcept;
  /// Points the follower of a part at `address`; nullptr: nowhere.
  void bind(std::size_t part, std::byte* address) const noexcept;

  struct Part {
    std::size_t num_visits = 0;
    bool bound = false;  // its follower points into the window
  };

  const ParamStoreSpec spec_;
  const std::vector<bool>& stored_;  // of spec_, per chunk
  const AddressFollower& params_;
  const AddressFollower& gradients_;
  ChunkStream& stream_;
  const SessionDevice& device_;
  Mutex mutex_;  // no other mutex is taken while it is held
  std::vector<Part> parts_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
