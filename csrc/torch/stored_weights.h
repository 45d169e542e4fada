#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_layout.h"
#include "core/home_store.h"
#include "core/mutex.h"
#include "io/chunk_stream.h"
#include "io/nvme_tier.h"
#include "torch/chunk_storages.h"
#include "torch/gradient_storages.h"
#include "torch/session_device.h"

namespace castor {

/// Use of a chunk's parameters (parts 0 to n - 1, by chunk) or gradients (parts n to 2n - 1).
struct WeightUse {
  std::size_t part = 0;
  bool writes = false;
};

/// What chunks have their homes in no memory, and how.
struct StoredHomes {
  std::vector<bool> chunks;
  bool gradients = true;  ///< theirs too
  /// Whether operators may change weights; else steps and loads alone do, where the weights are.
  bool writable = true;
  std::size_t max_held = 0;  ///< as HomeStore::max_held
  std::string no_address;    ///< what torch says to whoever asks for it
};

/// Parameters and gradients on NVMe, of the chunks that the host has no room for; or parameters of
/// which each rank has a part (CutHomes). They come into
/// host memory through a window, part by part: to be copied to the device, to be updated, and for
/// any operator that reads them elsewhere.
///
/// Outside of operators, and of modules that run on the device, its storage points nowhere, and
/// torch tells whoever asks for the address: nobody can keep one that will be another part's.
///
/// A device that computes by itself reads and writes the window where it is: what leaves it waits
/// for the copies and operators that were given its memory.
///
/// Owned by the session. Thread-safe, but for the binding of parameters, which the thread does that
/// runs forward, backward and step. What waits for a read may throw IoError or CorruptionError.
class StoredWeights final : public HomeStore {
 public:
  /// Of the window: enough for a chunk's update (parameters and gradients), a gradient that
  /// arrives and an operator, beside one copy to the device.
  static constexpr std::size_t kLeastSlots = 5;
  /// max_held() of a window with that many.
  [[nodiscard]] static constexpr std::size_t max_held_in(std::size_t num_slots) noexcept {
    return num_slots - (kLeastSlots - 1);
  }

  /// By part, what lies on NVMe where those chunks are stored.
  [[nodiscard]] static std::vector<std::vector<PayloadSpec>> parts_of(
      const ChunkLayout& layout, const std::vector<bool>& stored);
  /// Those on NVMe: of parts_of(layout, stored), in a stream of so many slots.
  [[nodiscard]] static StoredHomes on_nvme(std::vector<bool> stored, std::size_t num_slots);
  /// Those of which each rank has its part.
  [[nodiscard]] static StoredHomes on_ranks(std::vector<bool> cut, std::size_t max_held);
  /// `stream` is over the chunks' parts, parameters first. All outlive this.
  StoredWeights(const ChunkLayout& layout, StoredHomes homes, const ChunkStorages& storages,
                ChunkStream& stream, const SessionDevice& device);
  StoredWeights(const StoredWeights&) = delete;
  StoredWeights& operator=(const StoredWeights&) = delete;

  /// From now on the storages' addresses are told only while they point somewhere. Once their
  /// tensors are made.
  void forbid_addresses();

  [[nodiscard]] bool stored(ChunkId chunk) const noexcept override { return stored_[index(chunk)]; }
  [[nodiscard]] bool gradients_stored(ChunkId chunk) const noexcept override {
    return homes_.gradients && stored(chunk);
  }
  /// Throws UsageError unless operators may change the chunk's weights.
  void check_writable(ChunkId chunk) const;
  [[nodiscard]] std::unique_ptr<HomeHold> hold(ChunkId chunk) override;
  [[nodiscard]] std::size_t max_held() const noexcept override { return homes_.max_held; }
  void announce(std::span<const ChunkId> chunks) override;
  void moved_out(ChunkId chunk) noexcept override;

  [[nodiscard]] std::size_t parameters_of(ChunkId chunk) const noexcept { return index(chunk); }
  [[nodiscard]] std::size_t gradients_of(ChunkId chunk) const noexcept {
    return stored_.size() + index(chunk);
  }
  /// The storage of a gradient of a stored chunk; no storage for frozen ones.
  [[nodiscard]] const c10::Storage& gradient_storage(ParamId param) const {
    return gradients_->storage(param);
  }
  /// See GradientStorages::renew.
  c10::Storage renew_gradient_storage(ParamId param) { return gradients_->renew(param); }

  using Holds = std::vector<ChunkStream::Hold>;
  /// Parts that are in memory, and their storages bound there, while it lives.
  class Visit {
   public:
    Visit(StoredWeights& weights, std::vector<std::size_t> parts, Holds holds) noexcept
        : weights_(weights), parts_(std::move(parts)), holds_(std::move(holds)) {}
    ~Visit() {
      weights_.await_operators();
      weights_.unbind(parts_);
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    StoredWeights& weights_;
    std::vector<std::size_t> parts_;
    Holds holds_;
  };
  /// Different parts; parameters that are bound to the device must not be among them.
  [[nodiscard]] std::unique_ptr<Visit> visit(std::span<const WeightUse> uses);
  /// Parameters and gradients of a chunk for its update, in this order.
  [[nodiscard]] Holds hold_for_update(ChunkId chunk);
  /// These will be updated next.
  void announce_updates(std::span<const ChunkId> chunks);
  void forget_announced() { stream_.forget_announced(); }
  /// Calls `use` with the gradients of one chunk after the other, which are read ahead.
  void read_gradients(std::span<const ChunkId> chunks,
                      const std::function<void(ChunkId, const std::byte*)>& use);

  /// What the window has of the chunk's parameters is out of date, and nobody uses it.
  void forget(ChunkId chunk) { stream_.forget(parameters_of(chunk)); }
  /// Returns when no parameters are on their way into the window.
  void await_reads() { stream_.await_reads(); }

  /// Nobody will ask for the gradients before all of them have been written again.
  void discard_gradients(ChunkId chunk);
  /// All parameters are about to be replaced; gradients become zeros, if any are lost.
  void discard_parameters();

  [[nodiscard]] bool torn() const noexcept { return stream_.torn(); }

 private:
  void await_operators() const noexcept;
  void unbind(std::span<const std::size_t> parts) noexcept;
  /// Those of a part's tensors, at `address` or nowhere.
  void bind(std::size_t part, std::byte* address) const noexcept;

  struct Part {
    std::size_t num_visits = 0;
    bool bound = false;  // its storage points into the window
  };

  const StoredHomes homes_;
  const std::vector<bool>& stored_;  // of homes_, per chunk
  const ChunkStorages& storages_;
  ChunkStream& stream_;
  const SessionDevice& device_;
  std::unique_ptr<GradientStorages> gradients_;
  Mutex mutex_;  // nothing else is taken while it is held
  std::vector<Part> parts_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
