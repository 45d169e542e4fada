#include "io/thread_io_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "core/error.h"
#include "io/check_requests.h"

namespace castor {
namespace {

/// One system call: what to do about a short or failed one is the caller's to decide.
IoCompletion transfer(const IoRequest& request, int descriptor) noexcept {
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t transferred =
      request.operation == IoOperation::kRead
          ? ::pread(descriptor, request.buffer.data(), request.buffer.size(), offset)
          : ::pwrite(descriptor, request.buffer.data(), request.buffer.size(), offset);
  IoCompletion completion{.tag = request.tag, .expected_bytes = request.buffer.size()};
  if (transferred < 0) {
    completion.error_number = errno;
  } else {
    completion.transferred_bytes = static_cast<std::size_t>(transferred);
  }
  return completion;
}

}  // namespace

ThreadIoEngine::ThreadIoEngine(std::vector<IoFile> files, std::size_t queue_depth)
    : files_(std::move(files)), queue_depth_(queue_depth) {
  if (queue_depth == 0) {
    throw InvalidArgument("an I/O engine cannot have depth 0; give 1 or more");
  }
  completions_.reserve(queue_depth);
  const std::size_t num_threads = std::min(queue_depth, kMaxThreads);
  threads_.reserve(num_threads);
  for (std::size_t i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }
}

ThreadIoEngine::~ThreadIoEngine() {
  MutexLock lock(mutex_);
  completion_ready_.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex_) {
    wanted_ = in_flight_;
    return completions_.size() == in_flight_;
  });
}

void ThreadIoEngine::submit(std::span<const IoRequest> requests) {
  check_requests(requests, files_.size(), in_flight_, queue_depth_);
  {
    const MutexLock lock(mutex_);
    requests_.insert(requests_.end(), requests.begin(), requests.end());
  }
  in_flight_ += requests.size();
  if (requests.size() == 1) {
    request_ready_.notify_one();
  } else {
    request_ready_.notify_all();
  }
}

void ThreadIoEngine::collect(std::size_t at_least, std::vector<IoCompletion>& completions) {
  MutexLock lock(mutex_);
  wanted_ = std::min(at_least, in_flight_);
  completion_ready_.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex_) {
    return completions_.size() >= wanted_ || woken_;
  });
  woken_ = false;
  in_flight_ -= completions_.size();
  completions.insert(completions.end(), completions_.begin(), completions_.end());
  completions_.clear();
}

void ThreadIoEngine::wake() noexcept {
  {
    const MutexLock lock(mutex_);
    woken_ = true;
  }
  completion_ready_.notify_one();
}

std::string ThreadIoEngine::description() const {
  return "pread and pwrite in " + std::to_string(threads_.size()) + " threads";
}

void ThreadIoEngine::work(const std::stop_token& stop) {
  MutexLock lock(mutex_);
  while (request_ready_.wait(lock.native(), stop,
                             [&]() CASTOR_REQUIRES(mutex_) { return !requests_.empty(); })) {
    const IoRequest request = requests_.front();
    requests_.pop_front();
    lock.unlock();
    const IoCompletion completion = transfer(request, files_[request.file].descriptor);
    lock.lock();
    completions_.push_back(completion);
    if (completions_.size() >= wanted_) {
      completion_ready_.notify_one();
    }
  }
}

}  // namespace castor
