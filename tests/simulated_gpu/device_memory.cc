#include "device_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace castor::simulated {
namespace {

constexpr int kPoison = 0xff;

}  // namespace

DeviceMemory::~DeviceMemory() {
  for (const auto& [data, block] : blocks_)
    block.stream->synchronize();
  for (const auto& [data, block] : blocks_)
    std::free(data);
}

std::byte* DeviceMemory::allocate(std::size_t bytes, const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(mutex_);
  collect_locked();
  const std::size_t rounded = (bytes + kBlock - 1) / kBlock * kBlock;
  Pool& pool = cached_[stream->id()];
  std::byte* data = nullptr;
  if (const auto cached = pool.find(rounded); cached != pool.end()) {
    data = cached->second;
    pool.erase(cached);
    if (overwrite_at_ == Overwrite::kReuse)
      stream->enqueue([data, rounded] { std::memset(data, kPoison, rounded); });
  } else {
    if (rounded > room_locked())
      release_locked();
    if (rounded > room_locked())
      return nullptr;
    data = static_cast<std::byte*>(std::aligned_alloc(kBlock, rounded));
    if (data == nullptr)
      return nullptr;
    std::memset(data, kPoison, rounded);
    blocks_[data] = {.bytes = rounded, .stream = stream};
    figures_.reserved += rounded;
    figures_.peak_reserved = std::max(figures_.peak_reserved, figures_.reserved);
  }
  Block& block = blocks_.at(data);
  block.requested = bytes;
  block.live = true;
  figures_.allocated += block.bytes;
  figures_.peak_allocated = std::max(figures_.peak_allocated, figures_.allocated);
  for (const Tracker& tracker : trackers_)
    tracker(Action::kAllocated, data, bytes);
  return data;
}

void DeviceMemory::free(std::byte* data) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(data);
  if (found == blocks_.end() || !found->second.live)
    throw std::logic_error("the simulated GPU was given back what it has not lent");
  Block& block = found->second;
  block.live = false;
  figures_.allocated -= block.bytes;
  for (const Tracker& tracker : trackers_)
    tracker(Action::kFreed, data, block.requested);
  if (block.users.empty()) {
    cache_locked(data);
    return;
  }
  Held& held = held_.emplace_back(Held{.data = data});
  for (const auto& [id, user] : std::exchange(block.users, {}))
    held.uses.emplace_back(user);
}

void DeviceMemory::cache_locked(std::byte* data) {
  const Block& block = blocks_.at(data);
  if (overwrite_at_ == Overwrite::kFree)
    block.stream->enqueue([data, bytes = block.bytes] { std::memset(data, kPoison, bytes); });
  cached_[block.stream->id()].emplace(block.bytes, data);
}

void DeviceMemory::collect_locked() {
  for (auto held = held_.begin(); held != held_.end();) {
    const bool over = std::all_of(held->uses.begin(), held->uses.end(),
                                  [](const Moment& use) { return use.past(); });
    if (over)
      cache_locked(held->data);
    held = over ? held_.erase(held) : std::next(held);
  }
}

// As cudaFree does, it brings the device to rest first.
void DeviceMemory::release_locked() {
  for (const Held& held : held_) {
    for (const Moment& use : held.uses)
      use.wait();
  }
  collect_locked();
  Gpu::instance().synchronize();
  for (auto& [stream, pool] : cached_) {
    for (const auto& [bytes, data] : pool) {
      figures_.reserved -= bytes;
      blocks_.erase(data);
      std::free(data);
    }
    pool.clear();
  }
}

void DeviceMemory::overwrite_at(Overwrite when) {
  const std::lock_guard lock(mutex_);
  overwrite_at_ = when;
}

void DeviceMemory::record(std::byte* data, const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(data);
  if (found != blocks_.end() && found->second.live && found->second.stream != stream)
    found->second.users.emplace(stream->id(), stream);
}

void DeviceMemory::release_cached() {
  const std::lock_guard lock(mutex_);
  release_locked();
}

void DeviceMemory::take_beside(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  beside_ += bytes;
}

void DeviceMemory::give_beside(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  beside_ -= bytes;
}

std::size_t DeviceMemory::available() const {
  const std::lock_guard lock(mutex_);
  return capacity_ - std::min(capacity_, figures_.reserved + beside_);
}

std::size_t DeviceMemory::room_locked() const {
  const std::size_t most = std::min(limit_, capacity_ - std::min(capacity_, beside_));
  return most - std::min(most, figures_.reserved);
}

void DeviceMemory::limit(double fraction) {
  const std::lock_guard lock(mutex_);
  limit_ = static_cast<std::size_t>(fraction * static_cast<double>(capacity_));
}

bool DeviceMemory::contains(const void* data) const {
  auto* const address = const_cast<std::byte*>(static_cast<const std::byte*>(data));
  const std::lock_guard lock(mutex_);
  const auto next = blocks_.upper_bound(address);
  return next != blocks_.begin() &&
         address < std::prev(next)->first + std::prev(next)->second.bytes;
}

std::size_t DeviceMemory::limit() const {
  const std::lock_guard lock(mutex_);
  return limit_;
}

DeviceMemory::Figures DeviceMemory::figures() const {
  const std::lock_guard lock(mutex_);
  return figures_;
}

void DeviceMemory::reset_peaks() {
  const std::lock_guard lock(mutex_);
  figures_.peak_allocated = figures_.allocated;
  figures_.peak_reserved = figures_.reserved;
}

void DeviceMemory::track(Tracker tracker) {
  const std::lock_guard lock(mutex_);
  trackers_.push_back(std::move(tracker));
}

}  // namespace castor::simulated
