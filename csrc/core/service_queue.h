#pragma once

#include <algorithm>

namespace castor {

/// Simulated resource that serves one job at a time, in order of submission. Units are seconds and
/// bytes.
class ServiceQueue {
 public:
  explicit ServiceQueue(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  /// Submits a job of `bytes` at `now`; returns the time when the job is done.
  double serve(double now, double bytes) {
    const double seconds = bytes / bytes_per_second_;
    busy_ += seconds;
    free_at_ = std::max(free_at_, now) + seconds;
    return free_at_;
  }
  [[nodiscard]] double free_at() const noexcept { return free_at_; }
  [[nodiscard]] double busy() const noexcept { return busy_; }

 private:
  double bytes_per_second_;
  double free_at_ = 0.0;
  double busy_ = 0.0;
};

}  // namespace castor
