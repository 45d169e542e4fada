#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "core/executor.h"
#include "core/scalar_type.h"

namespace castor::testing {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

/// Runs bodies on `num_threads` fresh threads, last index first, so that nothing can depend on the
/// order, on the calling thread's floating-point mode or on leftovers of an earlier task.
class BackwardsExecutor final : public Executor {
 public:
  explicit BackwardsExecutor(std::size_t num_threads) : num_threads_(num_threads) {}

  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) override {
    num_tasks_ += count;
    std::atomic<std::size_t> left{count};
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < num_threads_; ++i) {
      threads.emplace_back([&] {
        for (std::size_t index = left.load(); index > 0;) {
          if (left.compare_exchange_weak(index, index - 1))
            body(index - 1);
        }
      });
    }
  }

  [[nodiscard]] std::size_t num_threads() const noexcept override { return num_threads_; }
  [[nodiscard]] std::size_t num_tasks() const noexcept { return num_tasks_; }

 private:
  std::size_t num_threads_;
  std::size_t num_tasks_ = 0;
};

/// Runs bodies on the calling thread.
class InlineExecutor final : public Executor {
 public:
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) override {
    num_tasks_ += count;
    for (std::size_t i = 0; i < count; ++i)
      body(i);
  }
  [[nodiscard]] std::size_t num_threads() const noexcept override { return 1; }
  [[nodiscard]] std::size_t num_tasks() const noexcept { return num_tasks_; }

 private:
  std::size_t num_tasks_ = 0;
};

/// `numel` elements that start `skew` elements after a cache line, with guard elements after them.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t numel, std::size_t skew = 0)
      : numel_(numel), skew_(skew), storage_(numel + skew + kGuards + 64, T{}) {
    std::memset(static_cast<void*>(data() + numel_), 0xA5, kGuards * sizeof(T));
  }

  [[nodiscard]] T* data() { return aligned(storage_.data()) + skew_; }
  [[nodiscard]] const T* data() const { return aligned(storage_.data()) + skew_; }
  [[nodiscard]] std::size_t size() const { return numel_; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }

  [[nodiscard]] bool same_bits(const Array& other) const {
    return numel_ == other.numel_ && std::memcmp(data(), other.data(), numel_ * sizeof(T)) == 0;
  }

  [[nodiscard]] bool guards_intact() const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(data() + numel_);
    for (std::size_t i = 0; i < kGuards * sizeof(T); ++i) {
      if (bytes[i] != 0xA5)
        return false;
    }
    return true;
  }

  // A copy keeps the elements and the skew; its cache line alignment is its own.
  Array(const Array& other) : Array(other.numel_, other.skew_) {
    std::memcpy(static_cast<void*>(data()), other.data(), numel_ * sizeof(T));
  }
  Array& operator=(const Array&) = delete;

 private:
  static constexpr std::size_t kGuards = 32;

  template <typename P>
  static P* aligned(P* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    return pointer + ((address + 63) / 64 * 64 - address) / sizeof(P);
  }

  std::size_t numel_;
  std::size_t skew_;
  std::vector<T> storage_;
};

}  // namespace castor::testing
