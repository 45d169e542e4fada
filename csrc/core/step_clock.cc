#include "core/step_clock.h"

namespace castor {

void StepClock::begin() noexcept {
  if (clock_) {
    drop();
    state_ = State::kTiming;
  }
}

void StepClock::mark(StreamId stream, Mark mark) {
  if (state_ != State::kTiming) {
    return;
  }
  marks_.push_back(mark);
  try {
    clock_->mark(stream);
  } catch (...) {
    marks_.pop_back();
    throw;
  }
}

void StepClock::await_chunks(StreamId stream) { mark(stream, {.event = true, .computes = false}); }

void StepClock::compute(StreamId stream) {
  if (!marks_.empty() && !marks_.back().computes) {  // else no event was recorded
    mark(stream, {.event = false, .computes = true});
  }
}

void StepClock::event(StreamId stream) { mark(stream, {.event = true, .computes = true}); }

void StepClock::end_passes(StreamId stream) {
  if (!marks_.empty() && marks_.back().computes) {
    mark(stream, {.event = false, .computes = false});
  }
}

void StepClock::finish() noexcept {
  if (state_ == State::kTiming && !marks_.empty() && !marks_.back().computes) {
    state_ = State::kFinished;
  } else {  // the step is not timed, or the mark of its end was refused
    drop();
  }
}

void StepClock::abandon() noexcept {
  if (state_ == State::kTiming) {
    drop();
  }
}

bool StepClock::take(DeviceTimes& times) {
  if (!pending() || !clock_->passed()) {
    return false;
  }
  const std::span<const std::uint64_t> at = clock_->times_ns();
  times.events.clear();
  times.end_ns = 0;
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    if (marks_[i].event) {
      times.events.push_back({.reached_ns = at[i]});
    }
    if (marks_[i].computes) {
      times.events.back().compute_ns += at[i + 1] - at[i];  // the last mark does not compute
    } else {
      times.end_ns = at[i];
    }
  }
  drop();
  return true;
}

void StepClock::drop() noexcept {
  if (clock_) {
    clock_->forget();
  }
  marks_.clear();
  state_ = State::kIdle;
}

}  // namespace castor
