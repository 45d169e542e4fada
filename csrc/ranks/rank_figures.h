#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace castor {

/// Bytes that this rank has sent to others, and the time that it was busy with them. One thread
/// adds to the figures; any thread reads them.
class RankFigures {
 public:
  [[nodiscard]] std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }
  /// Returns the time, with that of waiting for other ranks.
  [[nodiscard]] std::chrono::nanoseconds time() const noexcept {
    return std::chrono::nanoseconds(nanoseconds_);
  }

  /// Returns the bytes among bytes_sent() that went to ranks of other machines, where ranks of a
  /// machine share memory.
  [[nodiscard]] std::uint64_t bytes_crossed() const noexcept { return bytes_crossed_; }

  void add_bytes(std::uint64_t bytes) noexcept { bytes_sent_ += bytes; }
  void add_crossed(std::uint64_t bytes) noexcept {
    bytes_sent_ += bytes;
    bytes_crossed_ += bytes;
  }

  /// Adds the time that it lives to the figures.
  class Timed {
   public:
    explicit Timed(RankFigures& figures) noexcept : figures_(figures) {}
    ~Timed() {
      const std::chrono::nanoseconds busy = std::chrono::steady_clock::now() - start_;
      figures_.nanoseconds_ += static_cast<std::uint64_t>(busy.count());
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

   private:
    RankFigures& figures_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  };

 private:
  std::atomic<std::uint64_t> bytes_sent_ = 0;
  std::atomic<std::uint64_t> bytes_crossed_ = 0;
  std::atomic<std::uint64_t> nanoseconds_ = 0;
};

}  // namespace castor
