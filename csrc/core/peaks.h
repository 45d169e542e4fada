#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace castor {

/// Raises `maximum` to `value` if it is lower.
inline void raise_to(std::atomic<std::size_t>& maximum, std::size_t value) noexcept {
  std::size_t seen = maximum.load(std::memory_order_relaxed);
  while (seen < value && !maximum.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

/// The highest values of a counter of bytes: ever, and since a window began. Thread-safe and
/// lock-free; the counter itself stays with its owner.
class Peaks {
 public:
  /// The counter rose to `value`.
  void note(std::size_t value) noexcept {
    raise_to(highest_, value);
    raise_to(window_, value);
  }
  [[nodiscard]] std::size_t highest() const noexcept {
    return highest_.load(std::memory_order_relaxed);
  }
  /// The highest value since the previous call; the next window starts at `now`, the counter's
  /// current value.
  [[nodiscard]] std::size_t take_window(std::size_t now) noexcept {
    return std::max(window_.exchange(now, std::memory_order_relaxed), now);
  }

 private:
  // Relaxed: the values carry no other data; each update is one atomic operation.
  std::atomic<std::size_t> highest_{0};
  std::atomic<std::size_t> window_{0};
};

}  // namespace castor
