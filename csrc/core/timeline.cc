#include "core/timeline.h"

#include <algorithm>

namespace castor {

TimelineRecorder::TimelineRecorder(Clock clock, std::size_t num_chunks)
    : clock_(std::move(clock)), latest_fetch_(num_chunks, 0) {}

std::uint64_t TimelineRecorder::since_start(std::uint64_t time_ns) const noexcept {
  return time_ns > start_ns_ ? time_ns - start_ns_ : 0;
}

void TimelineRecorder::begin(std::uint64_t now_ns, std::vector<ChunkId> resident,
                             std::vector<ChunkId> on_device) {
  clear();
  start_ns_ = now_ns;
  step_.resident_at_start = std::move(resident);
  step_.on_device_at_start = std::move(on_device);
  recording_ = true;
}

void TimelineRecorder::close_window(std::uint64_t device_peak_bytes) {
  if (!step_.bytes.empty()) {
    std::uint64_t& peak = step_.bytes.back().device_peak_bytes;
    peak = std::max(peak, device_peak_bytes);
    step_.peak_device_bytes = std::max(step_.peak_device_bytes, device_peak_bytes);
  }
}

void TimelineRecorder::event(std::uint64_t slot_bytes, std::uint64_t host_bytes,
                             std::uint64_t device_peak_bytes) {
  close_window(device_peak_bytes);
  step_.bytes.push_back({slot_bytes, 0, host_bytes});
}

void TimelineRecorder::add(const Transfer& transfer) {
  if (step_.transfers.size() == kMaxTransfers) {
    step_.complete = false;
    return;
  }
  step_.transfers.push_back(transfer);
  step_.transfers.back().event = static_cast<std::uint32_t>(step_.bytes.size() - 1);
}

void TimelineRecorder::fetched(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns) {
  if (!recording_) {
    return;
  }
  add({.kind = TransferKind::kFetch,
       .cause = cause_,
       .chunk = chunk,
       .start_ns = since_start(start_ns),
       .submit_ns = clock_() - start_ns,
       .bytes = bytes});
  latest_fetch_[index(chunk)] =
      step_.complete ? static_cast<std::uint32_t>(step_.transfers.size()) : 0;
}

void TimelineRecorder::waited(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns) {
  if (!recording_ || latest_fetch_[index(chunk)] == 0) {
    return;
  }
  Transfer& fetch = step_.transfers[latest_fetch_[index(chunk)] - 1];
  fetch.wait_ns += clock_() - start_ns;
  fetch.bytes += bytes;
}

void TimelineRecorder::evicted(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns) {
  if (recording_) {
    add({.kind = TransferKind::kEviction,
         .cause = cause_,
         .chunk = chunk,
         .start_ns = since_start(start_ns),
         .submit_ns = clock_() - start_ns,
         .bytes = bytes});
  }
}

void TimelineRecorder::gradient_copied(ChunkId chunk, std::uint64_t bytes, std::uint64_t start_ns,
                                       std::uint64_t end_ns) {
  if (recording_) {
    add({.kind = TransferKind::kGradient,
         .cause = TransferCause::kBackward,
         .chunk = chunk,
         .start_ns = since_start(start_ns),
         .submit_ns = end_ns - start_ns,
         .bytes = bytes});
  }
}

void TimelineRecorder::begin_update() {
  if (recording_) {
    step_.update_begin_ns = since_start(clock_());
    updating_ = true;
  }
}

void TimelineRecorder::finish(Trace trace, std::uint64_t device_peak_bytes, Guidance guidance) {
  if (!recording_) {
    return;
  }
  if (trace.num_accesses() == 0) {
    clear();
    return;
  }
  close_window(device_peak_bytes);
  step_.trace = std::move(trace);
  step_.end_ns = since_start(clock_());
  if (!updating_) {
    step_.update_begin_ns = step_.end_ns;
  }
  step_.guidance = guidance;
  std::swap(step_, last_);
  clear();
}

void TimelineRecorder::time_last(StepClock& clock) {
  DeviceTimes& times = last_.device_times;
  if (clock.take(times) && times.events.size() != last_.bytes.size()) {
    times.events.clear();  // a mark was refused, which an error has told
  }
}

void TimelineRecorder::clear() noexcept {
  step_.trace = Trace();
  step_.bytes.clear();
  step_.transfers.clear();
  step_.resident_at_start.clear();
  step_.on_device_at_start.clear();
  step_.update_begin_ns = 0;
  step_.end_ns = 0;
  step_.peak_device_bytes = 0;
  step_.device_times.events.clear();
  step_.guidance = Guidance::kDemand;
  step_.complete = true;
  std::fill(latest_fetch_.begin(), latest_fetch_.end(), 0);
  recording_ = false;
  updating_ = false;
}

}  // namespace castor
