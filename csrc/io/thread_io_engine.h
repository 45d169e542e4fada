#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <stop_token>
#include <thread>
#include <vector>

#include "core/io_engine.h"
#include "core/mutex.h"
#include "io/io_file.h"

namespace castor {

/// IoEngine over threads that call pread and pwrite, for kernels and containers that forbid
/// io_uring. Each transfer in flight occupies a thread, which sleeps while the device works. So
/// there are as many threads as transfers, up to kMaxThreads.
///
/// Throws InvalidArgument for a depth of 0, std::system_error if the system refuses a thread.
class ThreadIoEngine final : public IoEngine {
 public:
  static constexpr std::size_t kMaxThreads = 64;

  ThreadIoEngine(std::vector<IoFile> files, std::size_t queue_depth);
  ~ThreadIoEngine() override;

  void submit(std::span<const IoRequest> requests) override;
  void collect(std::size_t at_least, std::vector<IoCompletion>& completions) override;
  void wake() noexcept override;
  [[nodiscard]] std::size_t queue_depth() const noexcept override { return queue_depth_; }
  [[nodiscard]] std::size_t in_flight() const noexcept override { return in_flight_; }
  [[nodiscard]] std::string description() const override;

 private:
  void work(const std::stop_token& stop);

  const std::vector<IoFile> files_;
  const std::size_t queue_depth_;
  std::size_t in_flight_ = 0;  // used by the calling thread alone

  Mutex mutex_;
  std::condition_variable_any request_ready_;
  std::condition_variable completion_ready_;
  std::deque<IoRequest> requests_ CASTOR_GUARDED_BY(mutex_);
  std::vector<IoCompletion> completions_ CASTOR_GUARDED_BY(mutex_);
  std::size_t wanted_ CASTOR_GUARDED_BY(mutex_) = 0;  // completions that collect() waits for
  bool woken_ CASTOR_GUARDED_BY(mutex_) = false;
  // Last: their destructors stop and join them while everything above is still alive.
  std::vector<std::jthread> threads_;
};

}  // namespace castor
