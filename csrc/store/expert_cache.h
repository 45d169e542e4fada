#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/mutex.h"
#include "core/peaks.h"
#include "core/spare_memory.h"
#include "store/expert_model.h"
#include "store/row_copies.h"

namespace castor {

/// Cache, on the device, of single experts of layers that have one tensor for all experts
/// (docs/design/0059).
///
/// Each layer has a number of *places*, and an expert of the layer in each: the expert's rows of
/// every parameter. A call of the layer brings the experts that it needs and that are not there,
/// over the ones used least recently. The places of a layer are one block of memory for each
/// parameter, so that the layer's own forward can compute with them as a tensor.
///
/// Before a layer's router has chosen, a caller may guess an expert (guess()). A layer without room
/// for all experts keeps a place for guesses from the first one on, so that a guess takes the place
/// of no expert that a call needs.
///
/// The memory is torch's, on the account of the model's activations. The layers take what the
/// budget leaves beside the chunks of all other parameters and the highest non-model memory of the
/// last two passes. They give it back, layer by layer, where anybody else needs room. A layer whose
/// share has no room for a call's experts has memory for that call alone.
///
/// fetch(), guess(), await() and release() are called by the thread whose forward is under way;
/// everything else by any thread. Owned by TorchExperts, which makes tensors of the rows.
class ExpertCache final : public SpareMemory {
 public:
  /// Figures of a run so far, and the bytes that the layers have now.
  struct Figures {
    std::uint64_t hits = 0;           ///< experts that a call needed and the cache had
    std::uint64_t misses = 0;         ///< experts that were copied from the host
    std::uint64_t fetched_bytes = 0;  ///< bytes of these copies
    std::size_t cache_bytes = 0;      ///< device bytes of the cache
    std::uint64_t guessed_bytes = 0;  ///< bytes copied for guesses, apart from fetched_bytes
    std::uint64_t right_guesses = 0;  ///< hits that a guess had copied
  };
  /// Experts of a call, on the device.
  struct Rows {
    /// For each parameter of the layer the memory of its rows, by place; ready after await().
    std::vector<std::shared_ptr<DeviceMemory>> params;
    /// Place of each expert of the call.
    std::vector<std::int64_t> places;
    std::int64_t num_places = 0;
  };

  /// `layers`: in order of execution.
  ExpertCache(ExpertParts parts, const std::vector<ExpertLayer>& layers);
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;

  /// Begins a call of a layer that needs `experts`, which are distinct: begins the copies of those
  /// that are not on the device. Returns nullopt where the layer's chunks have to come to the
  /// device instead (ExpertModel::begin_rows). Otherwise release() follows. Throws what begin_rows
  /// throws, and OutOfMemory.
  [[nodiscard]] std::optional<Rows> fetch(std::size_t layer, std::span<const std::int64_t> experts);
  /// Begins to copy, for the layer's next call, the first of the `likely` experts that the cache
  /// lacks, unless it has copied one of them already. No effect where the layer has no place for
  /// guesses yet, and where fetch() would return nullopt. Throws what begin_rows throws.
  void guess(std::size_t layer, std::span<const std::int64_t> likely);
  /// Returns whether a guess could be of use now; from here on the layer keeps a place for guesses.
  [[nodiscard]] bool takes_guesses(std::size_t layer);
  /// Makes the current stream wait for the copies of a parameter of the layer, given by its
  /// position in the layer. Rethrows a copy's failure.
  void await(std::size_t layer, std::size_t param);
  /// Ends a call of a layer, after all that it gave the device: the experts stay in the cache.
  /// Rethrows the failure of a copy that nobody awaited.
  void release(std::size_t layer);
  /// Frees the memory of all layers that no call is using. Places for guesses are kept again from
  /// the next guess on.
  void clear() noexcept;
  [[nodiscard]] bool give_up(std::size_t bytes) noexcept override;
  [[nodiscard]] Figures figures() const;

 private:
  static constexpr std::int64_t kNone = -1;
  using Memories = std::vector<std::shared_ptr<DeviceMemory>>;
  struct Layer {
    Layer(const ExpertParts& parts, const ExpertLayer& of_model);

    const ExpertLayer spec;
    const std::vector<ChunkId> chunks;
    const std::size_t expert_bytes;

    Memories memory;                      // per parameter; empty: the layer has no places
    std::vector<std::int64_t> expert_at;  // per place
    std::vector<std::int64_t> place_of;   // per expert
    std::vector<std::uint64_t> used;      // per place: number of the last call
    RowCopies copies;                     // of the call under way
    bool guesses = false;                 // whether one place is kept for guesses
    std::int64_t spare = kNone;           // that place, which no call has used yet
    RowCopies guess;                      // of the last guess
    bool guessed = false;                 // whether the call under way needs that guess
    bool in_use = false;
    bool for_one_call = false;
    [[nodiscard]] std::int64_t num_places() const {
      return static_cast<std::int64_t>(expert_at.size());
    }
  };

  [[nodiscard]] std::size_t places_for(const Layer& layer) const;
  void note_activity(std::size_t layer);
  void make_places(Layer& layer, std::size_t num_needed);
  void bring(Layer& layer, std::span<const std::int64_t> experts, Rows& rows)
      CASTOR_REQUIRES(mutex_);
  /// Copies rows of all parameters of the layer, one parameter after the other, with `copies`.
  void begin(Layer& layer, RowCopies& copies, std::span<const RowCopies::Row> rows);
  void keep_spare(Layer& layer) CASTOR_REQUIRES(mutex_);
  void forget_written(const Layer& layer);
  static void forget(Layer& layer);
  /// Moves the layer's memory into `dropped`, which is freed without the mutex.
  void drop(Layer& layer, Memories& dropped) CASTOR_REQUIRES(mutex_);

  const ExpertParts parts_;
  std::size_t streamed_bytes_ = 0;  // of the chunks that no pass reads by the row
  std::size_t layers_bytes_ = 0;    // of all experts
  Peaks::Window nonmodel_;          // since the last call
  // Of the thread whose forward is under way. Highest non-model bytes beside the cache.
  std::size_t last_layer_ = 0;
  std::size_t peak_ = 0;
  std::size_t previous_peak_ = 0;
  std::uint64_t num_calls_ = 0;

  mutable Mutex mutex_;  // taken after the runtime's
  std::vector<Layer> layers_;
  Figures figures_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
