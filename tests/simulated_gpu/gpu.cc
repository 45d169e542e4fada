#include "gpu.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

namespace castor::simulated {
namespace {

constexpr std::uint64_t kOneInLong = 50;  // of those that wait
constexpr int kLongFactor = 15;

}  // namespace

void DeviceError::fail(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (!failed_.load(std::memory_order_relaxed))
    message_ = message;
  failed_.store(true, std::memory_order_release);
}

std::optional<std::string> DeviceError::message() const {
  const std::lock_guard lock(mutex_);
  return failed_.load(std::memory_order_relaxed) ? std::optional(message_) : std::nullopt;
}

void DeviceError::reset() {
  const std::lock_guard lock(mutex_);
  failed_.store(false, std::memory_order_release);
}

Stream::Stream(std::uint64_t id, std::shared_ptr<DeviceError> error)
    : id_(id), error_(std::move(error)) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable())
    thread_.join();
}

std::uint64_t Stream::enqueue(Task task) {
  std::unique_lock lock(mutex_);
  const std::uint64_t number = ++num_enqueued_;
  if (closed_) {
    lock.unlock();
    run(task);
    lock.lock();
    ++num_done_;
    return number;
  }
  tasks_.push_back(std::move(task));
  if (!thread_.joinable())
    thread_ = std::thread([this] { work(); });
  changed_.notify_all();
  return number;
}

std::uint64_t Stream::num_enqueued() const {
  const std::lock_guard lock(mutex_);
  return num_enqueued_;
}

bool Stream::done(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return num_done_ >= number;
}

void Stream::wait(std::uint64_t number) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_done_ >= number; });
}

void Stream::delay(const Delays& delays) {
  const std::lock_guard lock(mutex_);
  delays_ = delays;
  random_.seed(delays.seed * 1000003 + id_);
}

void Stream::close() {
  synchronize();
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

std::chrono::microseconds Stream::next_delay_locked() {
  if (delays_.seed == 0 || random_() % delays_.one_in != 0)
    return {};
  const auto longest = static_cast<std::uint64_t>(delays_.longest.count());
  const std::chrono::microseconds delay(longest == 0 ? 0 : random_() % longest);
  return random_() % kOneInLong == 0 ? kLongFactor * delay : delay;
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty() || stopping_; });
    if (tasks_.empty())
      return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    const std::chrono::microseconds delay = next_delay_locked();
    lock.unlock();
    if (delay.count() > 0)
      std::this_thread::sleep_for(delay);
    run(task);
    task = nullptr;  // what it holds goes before anybody learns that it is done
    lock.lock();
    ++num_done_;
    changed_.notify_all();
  }
}

void Stream::run(const Task& task) {
  if (error_->failed())
    return;
  try {
    task();
  } catch (const std::exception& error) {
    error_->fail(error.what());
  } catch (...) {
    error_->fail("something that is no std::exception");
  }
}

void Moment::block(Stream& stream) const {
  if (stream_ && stream_.get() != &stream && !past())
    stream.enqueue([moment = *this] { moment.wait(); });
}

std::shared_ptr<const TimeStamp> stamp(Stream& stream) {
  auto time = std::make_shared<TimeStamp>(0);
  stream.enqueue([time] { *time = std::chrono::steady_clock::now().time_since_epoch().count(); });
  return time;
}

float milliseconds(const TimeStamp& start, const TimeStamp& end) {
  const std::chrono::steady_clock::duration between(end - start);
  return std::chrono::duration<float, std::milli>(between).count();
}

Gpu::Gpu() { static_cast<void>(new_stream()); }

Gpu& Gpu::instance() {
  static Gpu* const gpu = new Gpu;
  return *gpu;
}

std::shared_ptr<Stream> Gpu::stream(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(id);
  if (found == streams_.end())
    throw std::invalid_argument("the simulated GPU has no stream " + std::to_string(id));
  return found->second;
}

std::shared_ptr<Stream> Gpu::new_stream() {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_stream_++;
  auto stream = std::make_shared<Stream>(id, error_);
  stream->delay(delays_);
  if (closed_)
    stream->close();
  streams_.emplace(id, stream);
  return stream;
}

void Gpu::remove_stream(std::uint64_t id) {
  std::shared_ptr<Stream> last;  // goes without the lock
  const std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(id); found != streams_.end()) {
    last = std::move(found->second);
    streams_.erase(found);
  }
}

std::vector<std::shared_ptr<Stream>> Gpu::streams() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Stream>> all;
  for (const auto& [id, stream] : streams_)
    all.push_back(stream);
  return all;
}

void Gpu::synchronize() const {
  for (const auto& stream : streams())
    stream->synchronize();
}

void Gpu::delay(const Delays& delays) {
  {
    const std::lock_guard lock(mutex_);
    delays_ = delays;
  }
  for (const auto& stream : streams())
    stream->delay(delays);
}

void Gpu::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  for (const auto& stream : streams())
    stream->close();
}

void Gpu::limit_registered(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  registered_limit_ = bytes;
}

Gpu::Registered Gpu::register_host(const std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto next = registered_.lower_bound(data);
  if (next != registered_.end() && next->first < data + bytes)
    return Registered::kAlready;
  if (next != registered_.begin() && std::prev(next)->first + std::prev(next)->second > data)
    return Registered::kAlready;
  if (bytes > registered_limit_ || registered_bytes_ > registered_limit_ - bytes)
    return Registered::kBeyondLimit;
  registered_.emplace(data, bytes);
  registered_bytes_ += bytes;
  return Registered::kYes;
}

bool Gpu::unregister_host(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  const auto known = registered_.find(data);
  if (known == registered_.end())
    return false;
  registered_bytes_ -= known->second;
  registered_.erase(known);
  return true;
}

bool Gpu::is_registered(const void* data) const {
  const auto* const address = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  const auto next = registered_.upper_bound(address);
  return next != registered_.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

}  // namespace castor::simulated
