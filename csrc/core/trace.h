#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ids.h"

namespace castor {

/// Kind of an event of a step. kForwardEnter, kForwardExit and kBackwardEnter name a module,
/// kGradReady a chunk whose gradients are complete.
enum class EventKind : std::uint8_t { kForwardEnter, kForwardExit, kBackwardEnter, kGradReady };

inline constexpr std::uint8_t kNumEventKinds = 4;

/// One event of a step. Its index in the trace is the event's number.
struct Event {
  EventKind kind = EventKind::kForwardEnter;
  std::uint32_t id = 0;
  /// Highest non-model bytes from this event until the next one.
  std::uint64_t nonmodel_bytes = 0;
  /// Nanoseconds since the step's first event, by the host's clock.
  std::uint64_t time_ns = 0;

  [[nodiscard]] bool is_access() const noexcept {
    return kind == EventKind::kForwardEnter || kind == EventKind::kBackwardEnter;
  }
};

/// Immutable record of one training step. Value type.
class Trace {
 public:
  Trace() = default;
  explicit Trace(std::vector<Event> events);

  [[nodiscard]] const std::vector<Event>& events() const noexcept { return events_; }
  /// Returns the number of module accesses (forward and backward enters).
  [[nodiscard]] std::size_t num_accesses() const noexcept { return num_accesses_; }
  /// Returns a hash of the sequence of accesses: equal for steps that run the same modules in the
  /// same order.
  [[nodiscard]] std::uint64_t signature() const noexcept { return signature_; }
  [[nodiscard]] std::uint64_t peak_nonmodel_bytes() const noexcept { return peak_nonmodel_bytes_; }
  /// Returns the same accesses with the larger of both non-model curves at each event. Throws
  /// InvalidArgument when the numbers of events differ.
  [[nodiscard]] Trace merged_with(const Trace& other) const;

 private:
  std::vector<Event> events_;
  std::size_t num_accesses_ = 0;
  std::uint64_t signature_ = 0;
  std::uint64_t peak_nonmodel_bytes_ = 0;
};

/// Collector of the events of the step under way. Not thread-safe: the runtime's mutex guards it.
/// Stops collecting after kMaxEvents, so that a loop that never steps cannot fill the memory.
class Tracer {
 public:
  static constexpr std::size_t kMaxEvents = std::size_t{1} << 22;

  /// Appends an event. `nonmodel_bytes` is the peak since the previous record, and belongs to the
  /// previous event.
  void record(EventKind kind, std::uint32_t id, std::uint64_t nonmodel_bytes, std::uint64_t now_ns);
  /// Ends the step and returns its trace; the tracer is empty again.
  [[nodiscard]] Trace finish(std::uint64_t nonmodel_bytes);
  [[nodiscard]] bool complete() const noexcept { return events_.size() < kMaxEvents; }
  [[nodiscard]] bool empty() const noexcept { return events_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return events_.size(); }

 private:
  std::vector<Event> events_;
  std::uint64_t start_ns_ = 0;
};

}  // namespace castor
