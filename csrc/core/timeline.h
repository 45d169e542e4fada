#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/ids.h"
#include "core/trace.h"

namespace castor {

/// What moved between device and host, and which way.
enum class TransferKind : std::uint8_t {
  kFetch,     ///< a chunk's parameters came to the device
  kEviction,  ///< they left it; bytes are 0 where the home was up to date
  kGradient,  ///< a parameter's gradient went to its payload
};

/// Why it moved.
enum class TransferCause : std::uint8_t {
  kDemand,    ///< a module needed a chunk
  kPrefetch,  ///< the plan fetched a chunk ahead of its use
  kPlan,      ///< the plan left room for activations
  kPressure,  ///< an allocation did not fit
  kStepEnd,   ///< every chunk goes home before the update
  kBackward,  ///< a gradient is complete, or all of a chunk that is updated at once
};

/// One move. Times are nanoseconds since the step's first event.
struct Transfer {
  TransferKind kind = TransferKind::kFetch;
  TransferCause cause = TransferCause::kDemand;
  /// Index of the event under way.
  std::uint32_t event = 0;
  ChunkId chunk{};
  std::uint64_t start_ns = 0;
  /// How long the caller was held up until the copy was under way (or done: CPU copies are).
  std::uint64_t submit_ns = 0;
  /// How long the first use of the chunk waited for the rest of the copy. Fetches only.
  std::uint64_t wait_ns = 0;
  /// Bytes copied.
  std::uint64_t bytes = 0;
};

/// What told the step when to move chunks.
enum class Guidance : std::uint8_t {
  kDemand,    ///< nothing: there was no plan yet
  kPlan,      ///< the plan, from beginning to end
  kDiverged,  ///< the plan, until the step ran another module than planned
};

/// Bytes held at an event.
struct EventBytes {
  /// Slots that come and go, when the event began.
  std::uint64_t slot_bytes = 0;
  /// Highest device total from this event until the next one.
  std::uint64_t device_peak_bytes = 0;
  /// Of the host tier, when the event began.
  std::uint64_t host_bytes = 0;
};

/// What one training step did, event by event. Value type.
struct Timeline {
  Trace trace;
  std::vector<EventBytes> bytes;  ///< parallel to trace.events()
  std::vector<Transfer> transfers;
  std::vector<ChunkId> resident_at_start;   ///< streamed chunks that inference left on the device
  std::vector<ChunkId> on_device_at_start;  ///< with all their payloads; an eviction of one of them
                                            ///< sends those home and makes it a streamed chunk
  std::uint64_t update_begin_ns = 0;        ///< optimizer.step() began; end_ns where it never did
  std::uint64_t end_ns = 0;
  std::uint64_t peak_device_bytes = 0;
  Guidance guidance = Guidance::kDemand;
  /// False where the step had more events or transfers than the recorders keep.
  bool complete = true;
};

/// Records the step under way beside the Tracer, and keeps the last finished one. Owned by the
/// runtime; the chunk manager tells it of its transfers. Not thread-safe: the runtime's mutex
/// guards it. A record is an append to a vector whose capacity the next step takes over. Invariant:
/// between begin and finish, one entry of bytes per event of the Tracer.
class TimelineRecorder {
 public:
  using Clock = std::function<std::uint64_t()>;  ///< nanoseconds, monotonic
  static constexpr std::size_t kMaxTransfers = std::size_t{1} << 20;

  TimelineRecorder(Clock clock, std::size_t num_chunks);

  /// The clock, or 0 outside a step, whose transfers are not recorded: reading it costs more than
  /// the record.
  [[nodiscard]] std::uint64_t now() const { return recording_ ? clock_() : 0; }

  void begin(std::uint64_t now_ns, std::vector<ChunkId> resident,
             std::vector<ChunkId> on_device = {});
  /// `device_peak_bytes` is the peak since the previous event: it belongs to that one.
  void event(std::uint64_t slot_bytes, std::uint64_t host_bytes, std::uint64_t device_peak_bytes);
  /// Why the transfers that follow happen. Returns what it was.
  TransferCause set_cause(TransferCause cause) noexcept { return std::exchange(cause_, cause); }

  /// A transfer began at `start_ns`, as now() told, and ends now.
  void fetched(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns);
  void evicted(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns);
  /// The latest fetch of `chunk` was waited for from `start_ns` until now; where user code wrote to
  /// the home in the meantime, `bytes` were copied again.
  void waited(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns);
  /// Both times are of the recorder's clock.
  void gradient_copied(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns,
                       std::uint64_t end_ns);
  void begin_update();

  /// Ends the step: what was recorded, with its trace, becomes last(). `device_peak_bytes` as in
  /// event(). No effect when none is under way; a step without events leaves last() as it is.
  void finish(Trace trace, std::uint64_t device_peak_bytes, Guidance guidance);
  /// An event was lost: the step's timeline will not be complete.
  void drop_event() noexcept { step_.complete = false; }
  /// The last finished step; without events before there is one.
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

/// Sets the cause of transfers for a scope.
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
