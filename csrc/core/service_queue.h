#pragma once

#include <algorithm>

namespace castor {

/// A simulated resource: serves one job at a time, in order of submission. Seconds and bytes.
class ServiceQueue {
 public:
  explicit ServiceQueue(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  /// Submits at `now`; returns when the job is done.
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
