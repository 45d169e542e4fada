#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/compute_stream.h"
#include "core/device_clock.h"

namespace castor {

/// Times of one event of a step by the device's clock.
struct DeviceTime {
  /// Nanoseconds from the step's first event until the device came to this one.
  std::uint64_t reached_ns = 0;
  /// Nanoseconds of computing until the next event: the device's own work, and its waits for a host
  /// that launches more slowly than the device works. Waits for chunks are left out.
  std::uint64_t compute_ns = 0;
};

/// Times of one step by the device's clock. Value type.
struct DeviceTimes {
  std::vector<DeviceTime> events;  ///< one for each event of the trace; empty: not measured
  std::uint64_t end_ns = 0;        ///< the device came to the end of the passes
};

/// Times the events of a step by the clock of the device, without waiting for the device
/// (docs/design/0070). Owned by the runtime, whose mutex guards it. Without a clock, and in steps
/// that are not timed, its functions do nothing.
///
/// A step begins by begin(). Each event is marked by await_chunks(), where its module then waits
/// for chunks, until compute(); or by event(), where computing goes on. The step's passes end by
/// end_passes(), the step by finish(). Its times are there when the device has come to the last
/// mark, until another step is finished.
class StepClock {
 public:
  explicit StepClock(std::unique_ptr<DeviceClock> clock) : clock_(std::move(clock)) {}

  /// Returns whether there is a clock.
  [[nodiscard]] bool present() const noexcept { return clock_ != nullptr; }
  /// Begins a step that is timed. Drops the times of the step before that nobody has taken.
  void begin() noexcept;
  /// Begins an event, and a wait for its chunks. This function, and those below that take a stream,
  /// throw Error where the device has failed.
  void await_chunks(StreamId stream);
  /// Ends that wait.
  void compute(StreamId stream);
  /// Begins an event whose chunks are there.
  void event(StreamId stream);
  /// Ends the passes, until another event if one follows: the optimizer's step began.
  void end_passes(StreamId stream);
  /// Ends the step. Drops the times of the step before, if this one was not timed.
  void finish() noexcept;
  /// Forgets the step that is under way, if it is timed: it was none.
  void abandon() noexcept;
  /// Returns whether a step is finished whose times have not been taken.
  [[nodiscard]] bool pending() const noexcept { return state_ == State::kFinished; }
  /// Takes the times of the finished step. Returns false, and leaves `times` alone, while the
  /// device has not come to its end, and where nothing is pending. Throws Error where the device
  /// has failed.
  [[nodiscard]] bool take(DeviceTimes& times);

 private:
  enum class State : std::uint8_t { kIdle, kTiming, kFinished };
  /// Mark in the order of the stream: whether an event begins there, and whether the device
  /// computes from there to the next mark.
  struct Mark {
    bool event = false;
    bool computes = false;
  };

  void mark(StreamId stream, Mark mark);
  void drop() noexcept;

  std::unique_ptr<DeviceClock> clock_;
  std::vector<Mark> marks_;
  State state_ = State::kIdle;
};

}  // namespace castor
