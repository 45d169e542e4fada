#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/ids.h"
#include "core/step_clock.h"
#include "core/trace.h"

namespace castor {

/// Kind of a transfer between device and host.
enum class TransferKind : std::uint8_t {
  kFetch,     ///< a chunk's parameters came to the device
  kEviction,  ///< they left it; bytes are 0 where the host storage was up to date
  kGradient,  ///< a parameter's gradient went to its payload
};

/// Cause of a transfer.
enum class TransferCause : std::uint8_t {
  kDemand,    ///< a module needed a chunk
  kPrefetch,  ///< the plan fetched a chunk ahead of its use
  kPlan,      ///< the plan left room for activations
  kPressure,  ///< an allocation did not fit
  kStepEnd,   ///< every chunk goes to host storage before the update
  kBackward,  ///< a gradient is complete, or all of a chunk that is updated at once
};

/// One transfer. Times are nanoseconds since the step's first event, by the host's clock.
struct Transfer {
  TransferKind kind = TransferKind::kFetch;
  TransferCause cause = TransferCause::kDemand;
  /// Index of the event under way.
  std::uint32_t event = 0;
  ChunkId chunk{};
  std::uint64_t start_ns = 0;
  /// Time for which the caller was held up until the copy was under way, or done if a CPU copies.
  std::uint64_t submit_ns = 0;
  /// Time for which the first use of the chunk waited for the rest of the copy. Fetches only.
  std::uint64_t wait_ns = 0;
  /// Bytes copied.
  std::uint64_t bytes = 0;
};

/// Source of the decisions when to move chunks in a step.
enum class Guidance : std::uint8_t {
  kDemand,    ///< nothing: there was no plan yet
  kPlan,      ///< the plan, from beginning to end
  kDiverged,  ///< the plan, until the step ran another module than planned
};

/// Bytes in use at an event.
struct EventBytes {
  /// Bytes of slots that come and go, when the event began.
  std::uint64_t slot_bytes = 0;
  /// Highest device total from this event until the next one.
  std::uint64_t device_peak_bytes = 0;
  /// Bytes used on the host tier, when the event began.
  std::uint64_t host_bytes = 0;
};

/// Record of one training step, event by event. Value type.
struct Timeline {
  Trace trace;
  std::vector<EventBytes> bytes;  ///< parallel to trace.events()
  std::vector<Transfer> transfers;
  std::vector<ChunkId> resident_at_start;  ///< streamed chunks that inference left on the device
  /// Chunks on the device with all their payloads. An eviction of one of them sends these to host
  /// storage and makes it a streamed chunk.
  std::vector<ChunkId> on_device_at_start;
  std::uint64_t update_begin_ns = 0;  ///< optimizer.step() began; end_ns where it never did
  std::uint64_t end_ns = 0;
  std::uint64_t peak_device_bytes = 0;
  DeviceTimes device_times;  ///< by the clock of a device that works beside the host
  Guidance guidance = Guidance::kDemand;
  /// Whether nothing is missing; false where the step had more events or transfers than the
  /// recorders keep.
  bool complete = true;
};

/// Recorder of the step under way, beside the Tracer; it also keeps the last finished one. Owned by
/// the runtime; the chunk manager tells it of its transfers. Not thread-safe: the runtime's mutex
/// guards it. A record is an append to a vector whose capacity the next step takes over. Invariant:
/// between begin and finish, one entry of bytes per event of the Tracer.
class TimelineRecorder {
 public:
  using Clock = std::function<std::uint64_t()>;  ///< nanoseconds, monotonic
  static constexpr std::size_t kMaxTransfers = std::size_t{1} << 20;

  TimelineRecorder(Clock clock, std::size_t num_chunks);

  /// Returns the clock, or 0 outside a step: transfers are not recorded there, and reading the
  /// clock costs more than the record.
  [[nodiscard]] std::uint64_t now() const { return recording_ ? clock_() : 0; }

  void begin(std::uint64_t now_ns, std::vector<ChunkId> resident,
             std::vector<ChunkId> on_device = {});
  /// Begins an event. `device_peak_bytes` is the peak since the previous event, and belongs to that
  /// one.
  void event(std::uint64_t slot_bytes, std::uint64_t host_bytes, std::uint64_t device_peak_bytes);
  /// Sets the cause of the transfers that follow. Returns the previous one.
  TransferCause set_cause(TransferCause cause) noexcept { return std::exchange(cause_, cause); }

  /// Records a transfer that began at `start_ns`, as now() told, and ends now.
  void fetched(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns);
  void evicted(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns);
  /// Records that the latest fetch of `chunk` was waited for from `start_ns` until now. Where user
  /// code wrote to the host storage in the meantime, `bytes` were copied again.
  void waited(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns);
  /// Records the copy of a gradient. Both times are of the recorder's clock.
  void gradient_copied(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns,
                       std::uint64_t end_ns);
  void begin_update();

  /// Ends the step: its record, with its trace, becomes last(). `device_peak_bytes` is that of
  /// event(). No effect when no step is under way; a step without accesses leaves last() as it is.
  void finish(Trace trace, std::uint64_t device_peak_bytes, Guidance guidance);
  /// Adds the times that `clock` has for the last finished step, once they are there.
  void time_last(StepClock& clock);
  /// Notes that an event was lost: the step's timeline will not be complete.
  void drop_event() noexcept { step_.complete = false; }
  /// Returns the last finished step; it has no events before there is one.
  [[nodiscard]] const Timeline& last() const noexcept { return last_; }

 private:
  [[nodiscard]] std::uint64_t since_start(std::uint64_t time_ns) const noexcept;
  void add(const Transfer& transfer);
  void close_window(std::uint64_t device_peak_bytes);
  void clear() noexcept;

  Clock clock_;
  Timeline step_;  // under way
  Timeline last_;
  std::vector<std::uint32_t> latest_fetch_;  // per chunk: its position in step_.transfers, plus 1
  TransferCause cause_ = TransferCause::kDemand;
  std::uint64_t start_ns_ = 0;
  bool recording_ = false;
  bool updating_ = false;
};

/// Scope that sets the cause of transfers.
class CauseScope {
 public:
  CauseScope(TimelineRecorder& recorder, TransferCause cause) noexcept
      : recorder_(recorder), before_(recorder.set_cause(cause)) {}
  ~CauseScope() { recorder_.set_cause(before_); }
  CauseScope(const CauseScope&) = delete;
  CauseScope& operator=(const CauseScope&) = delete;

 private:
  TimelineRecorder& recorder_;
  TransferCause before_;
};

}  // namespace castor
