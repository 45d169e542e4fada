#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

namespace castor {

/// Raises `maximum` to `value` if it is lower.
inline void raise_to(std::atomic<std::size_t>& maximum, std::size_t value) noexcept {
  std::size_t seen = maximum.load(std::memory_order_relaxed);
  while (seen < value && !maximum.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

/// Highest values of a counter of bytes: since construction, and for each window since it began.
/// Thread-safe; note() is lock-free. The counter itself stays with its owner.
class Peaks {
  struct Cell {
    std::atomic<std::size_t> highest{0};
    std::atomic<bool> open{true};
    Cell* next = nullptr;
  };

 public:
  Peaks() = default;
  Peaks(const Peaks&) = delete;
  Peaks& operator=(const Peaks&) = delete;
  ~Peaks() {
    for (Cell* cell = first_.load(std::memory_order_acquire); cell != nullptr;) {
      delete std::exchange(cell, cell->next);
    }
  }

  /// Window of one reader. Ends before the Peaks do.
  class Window {
   public:
    /// Opens a window; `now` is the counter's value.
    Window(Peaks& peaks, std::size_t now) : cell_(peaks.open_cell()) { cell_->highest.store(now); }
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;
    ~Window() { cell_->open.store(false, std::memory_order_release); }
    /// Returns the highest value since the previous call. The next window starts at `now`, the
    /// counter's current value.
    [[nodiscard]] std::size_t take(std::size_t now) noexcept {
      return std::max(cell_->highest.exchange(now, std::memory_order_relaxed), now);
    }

   private:
    Cell* const cell_;
  };

  /// Notes that the counter rose to `value`.
  void note(std::size_t value) noexcept {
    raise_to(highest_, value);
    for (Cell* cell = first_.load(std::memory_order_acquire); cell != nullptr; cell = cell->next) {
      raise_to(cell->highest, value);
    }
  }
  [[nodiscard]] std::size_t highest() const noexcept {
    return highest_.load(std::memory_order_relaxed);
  }

 private:
  // Cells stay in the list, which note() walks at any time, and are reused.
  Cell* open_cell() {
    for (Cell* cell = first_.load(std::memory_order_acquire); cell != nullptr; cell = cell->next) {
      bool open = false;
      if (cell->open.compare_exchange_strong(open, true, std::memory_order_acquire)) {
        return cell;
      }
    }
    Cell* const cell = new Cell;
    cell->next = first_.load(std::memory_order_relaxed);
    while (!first_.compare_exchange_weak(cell->next, cell, std::memory_order_release)) {
    }
    return cell;
  }

  // Relaxed, but for the list: the values carry no other data; each update is one atomic operation.
  std::atomic<std::size_t> highest_{0};
  std::atomic<Cell*> first_{nullptr};
};

}  // namespace castor
