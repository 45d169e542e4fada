#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace castor::simulated {

using Task = std::function<void()>;

/// How long streams dawdle before a task, seeded: of `one_in` tasks one waits up to `longest`, and
/// a few of those much longer. Seed 0: none waits.
struct Delays {
  std::uint64_t seed = 0;
  std::chrono::microseconds longest{200};
  std::uint64_t one_in = 8;
};

/// What a task failed with. As on a GPU it spoils the device: no later task runs, and whoever
/// synchronises is told, until reset(). Thread-safe.
class DeviceError {
 public:
  void fail(const std::string& message);
  [[nodiscard]] std::optional<std::string> message() const;
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  void reset();

 private:
  mutable std::mutex mutex_;  // guards message_
  std::string message_;
  std::atomic<bool> failed_{false};
};

/// Tasks run one after the other by a thread of the stream's own, which starts with the first.
/// Thread-safe. Destruction waits for all of them.
class Stream {
 public:
  Stream(std::uint64_t id, std::shared_ptr<DeviceError> error);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
  /// Returns the task's number; the first is 1.
  std::uint64_t enqueue(Task task);
  [[nodiscard]] std::uint64_t num_enqueued() const;
  [[nodiscard]] bool done(std::uint64_t number) const;
  void wait(std::uint64_t number) const;
  void synchronize() const { wait(num_enqueued()); }
  void delay(const Delays& delays);
  /// Tasks run on the calling thread from now on: the process ends, and threads end with it.
  void close();

 private:
  void work();
  void run(const Task& task);
  [[nodiscard]] std::chrono::microseconds next_delay_locked();

  const std::uint64_t id_;
  const std::shared_ptr<DeviceError> error_;
  mutable std::mutex mutex_;  // guards all below
  mutable std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::uint64_t num_enqueued_ = 0;
  std::uint64_t num_done_ = 0;
  bool stopping_ = false;
  bool closed_ = false;
  Delays delays_;
  std::mt19937_64 random_;
  std::thread thread_;
};

/// All that a stream had been given at some moment: what an event records. Copies are cheap.
class Moment {
 public:
  Moment() = default;  ///< of no stream: long past
  explicit Moment(std::shared_ptr<Stream> stream)
      : stream_(std::move(stream)), number_(stream_->num_enqueued()) {}

  [[nodiscard]] bool past() const { return !stream_ || stream_->done(number_); }
  void wait() const {
    if (stream_)
      stream_->wait(number_);
  }
  /// `stream` does nothing more before this moment is past.
  void block(Stream& stream) const;

 private:
  std::shared_ptr<Stream> stream_;
  std::uint64_t number_ = 0;
};

/// The time at which a stream came to a task, by the clock of the thread that runs the stream.
using TimeStamp = std::atomic<std::chrono::steady_clock::rep>;

/// Has a stream note the time when it comes to this task.
[[nodiscard]] std::shared_ptr<const TimeStamp> stamp(Stream& stream);
/// Milliseconds between two tasks that are done.
[[nodiscard]] float milliseconds(const TimeStamp& start, const TimeStamp& end);

/// Streams, host memory that is registered, and the error of one simulated GPU. Thread-safe.
class Gpu {
 public:
  /// The one of the process. Never destroyed: its streams outlive what static objects still free.
  static Gpu& instance();

  /// Stream 0 is the default one, and there from the start.
  [[nodiscard]] std::shared_ptr<Stream> stream(std::uint64_t id) const;
  [[nodiscard]] std::shared_ptr<Stream> new_stream();
  /// Forgets a stream, which completes its tasks.
  void remove_stream(std::uint64_t id);
  void synchronize() const;
  /// Of every stream, those to come included.
  void delay(const Delays& delays);
  void close();

  enum class Registered { kYes, kAlready, kBeyondLimit };
  /// Host memory that the GPU copies from and to by itself.
  [[nodiscard]] Registered register_host(const std::byte* data, std::size_t bytes);
  /// No more than this is registered at once from now on, as RLIMIT_MEMLOCK has it.
  void limit_registered(std::size_t bytes);
  [[nodiscard]] bool unregister_host(const std::byte* data);
  [[nodiscard]] bool is_registered(const void* data) const;

  /// The stream that says it is captured into a graph, which records nothing; -1: none.
  void capture(std::int64_t stream) noexcept { capturing_ = stream; }
  [[nodiscard]] std::int64_t capturing() const noexcept { return capturing_; }

  [[nodiscard]] DeviceError& error() noexcept { return *error_; }

 private:
  Gpu();
  [[nodiscard]] std::vector<std::shared_ptr<Stream>> streams() const;

  const std::shared_ptr<DeviceError> error_ = std::make_shared<DeviceError>();
  std::atomic<std::int64_t> capturing_{-1};
  mutable std::mutex mutex_;  // guards all below
  std::map<std::uint64_t, std::shared_ptr<Stream>> streams_;
  std::uint64_t next_stream_ = 0;
  Delays delays_;
  bool closed_ = false;
  std::map<const std::byte*, std::size_t> registered_;
  std::size_t registered_bytes_ = 0;
  std::size_t registered_limit_ = SIZE_MAX;
};

}  // namespace castor::simulated
