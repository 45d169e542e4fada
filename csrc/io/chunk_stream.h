#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/executor.h"
#include "io/stored_payload.h"
#include "io/transfer_queue.h"

namespace castor {

enum class StreamAccess {
  kRead,    ///< read and left as it is: a checkpoint is saved
  kWrite,   ///< written without being read, contents unspecified before: states are made, or loaded
  kUpdate,  ///< read and written back: an optimizer step
};

/// One unit of work: a chunk, with the payloads of it that lie on NVMe.
struct StreamItem {
  struct Part {
    StoredPayload* payload = nullptr;
    StreamAccess access = StreamAccess::kUpdate;
  };
  std::vector<Part> parts;
};

enum class ItemProgress : std::uint8_t {
  kUntouched,  ///< at most read; nothing has changed anywhere
  kStarted,  ///< its work has begun, so that memory may have changed; NVMe holds the old payloads,
             ///< or torn ones
  kDone,     ///< its work has ended, and every payload that it writes is on NVMe
};

/// How far a pass came: what decides, after an error, whether the state is still that of one step.
struct StreamProgress {
  std::vector<ItemProgress> items;

  [[nodiscard]] std::size_t count(ItemProgress progress) const noexcept;
  /// Nothing was changed: the same pass may be tried again.
  [[nodiscard]] bool unchanged() const noexcept {
    return count(ItemProgress::kUntouched) == items.size();
  }
  [[nodiscard]] bool complete() const noexcept {
    return count(ItemProgress::kDone) == items.size();
  }
  /// Some items belong to the new step and some to the old: no further step, and no save, may use
  /// this state.
  [[nodiscard]] bool broken() const noexcept { return !unchanged() && !complete(); }
  /// "4 of 12 chunks are updated, 1 is half-way, 7 are as before".
  [[nodiscard]] std::string summary() const;
};

/// Passes over chunks whose payloads lie on NVMe, in bounded memory: while item i is worked on,
/// item i+1 is being read and item i-1 is being written. The ring's memory is cut into slots as
/// large as the largest item; 3 slots overlap everything, 2 wait for writes, 1 does one thing at a
/// time.
///
/// Items do not share a payload. Checksums are made before a write and compared before the work, in
/// the calling thread and the executor, beside the transfers. Borrows queue, executor and ring. One
/// pass at a time.
class ChunkStream {
 public:
  /// More slots than this would only read further ahead than the device is deep.
  static constexpr std::size_t kMaxSlots = 4;

  /// `ring` is host memory of any alignment; give it to the engine as a registered buffer.
  /// `alignment` is ScratchSpace::alignment().
  ChunkStream(TransferQueue& queue, Executor& executor, std::span<std::byte> ring,
              std::size_t alignment, Verification verification);

  /// Gets the payloads of an item in the order of its parts, each of StoredPayload::bytes().
  using Work =
      std::function<void(std::size_t item, std::span<const std::span<std::byte>> payloads)>;

  /// Does the work of each item, in order, on the calling thread. An error (IoError,
  /// CorruptionError, UsageError for a payload without contents, or the work's own) ends the pass:
  /// nothing is in flight then, no later item is touched, and `progress` says how far it came.
  /// Throws InvalidArgument, with progress unchanged(), when the largest item is larger than the
  /// ring.
  void process(std::span<const StreamItem> items, const Work& work, StreamProgress& progress);

  /// Slots that a pass over these items has; 0 when the largest does not fit.
  [[nodiscard]] std::size_t num_slots(std::span<const StreamItem> items) const;
  /// Ring memory that gives a pass over these items `num_slots` slots.
  [[nodiscard]] static std::size_t ring_bytes(std::span<const StreamItem> items,
                                              std::size_t num_slots, std::size_t alignment);

 private:
  struct Slot;
  class Pass;

  TransferQueue& queue_;
  Executor& executor_;
  std::span<std::byte> ring_;  // aligned
  Verification verification_;
};

}  // namespace castor
