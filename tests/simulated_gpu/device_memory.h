#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu.h"

namespace castor::simulated {

/// The memory of a GPU behind a caching allocator, with torch's rules:
///
/// - A block belongs to the stream it was allocated for. Freed, it is that stream's again at once,
///   though work of any stream may be under way on it: later work of that stream is in order.
/// - record(): another stream uses the block. Freed, it is held back until that stream has done
///   what it had been given when the block was freed.
/// - What is cached goes to other streams only after the device has come to rest: when there is no
///   room otherwise, or by release_cached().
///
/// The bytes of a freed block become 0xff (NaN) in the order of its stream; so are those of a new
/// one. See overwrite_at(). Thread-safe.
class DeviceMemory {
 public:
  static constexpr std::size_t kBlock = 512;  ///< what sizes are rounded up to

  struct Figures {
    std::size_t allocated = 0;
    std::size_t peak_allocated = 0;
    std::size_t reserved = 0;  ///< allocated, held back and cached
    std::size_t peak_reserved = 0;
  };
  enum class Action { kAllocated, kFreed };
  /// Under the allocator's lock, with the bytes that were asked for.
  using Tracker = std::function<void(Action, std::byte* data, std::size_t bytes)>;

  explicit DeviceMemory(std::size_t capacity) : capacity_(capacity), limit_(capacity) {}
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// nullptr: there is no room, with nothing left in the cache. Every later release of other blocks
  /// may make room.
  [[nodiscard]] std::byte* allocate(std::size_t bytes, const std::shared_ptr<Stream>& stream);
  void free(std::byte* data);
  void record(std::byte* data, const std::shared_ptr<Stream>& stream);
  void release_cached();
  /// Bytes that others than the allocator take from the device, and give back.
  void take_beside(std::size_t bytes);
  void give_beside(std::size_t bytes);
  /// Of the whole device; 0 where more is taken than it has.
  [[nodiscard]] std::size_t available() const;
  /// No more than this is reserved; 0 <= fraction <= 1 of the capacity.
  void limit(double fraction);
  enum class Overwrite { kFree, kReuse };
  /// When a freed block's bytes become 0xff: at once, or when it is given out again, as on a GPU.
  /// Programs that order only later work of the block's stream after its readers need kReuse.
  void overwrite_at(Overwrite when);

  [[nodiscard]] bool contains(const void* data) const;
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::size_t limit() const;
  [[nodiscard]] Figures figures() const;
  void reset_peaks();
  void track(Tracker tracker);

 private:
  struct Block {
    std::size_t bytes = 0;
    std::size_t requested = 0;
    std::shared_ptr<Stream> stream;
    std::map<std::uint64_t, std::shared_ptr<Stream>> users;
    bool live = false;
  };
  struct Held {
    std::byte* data = nullptr;
    std::vector<Moment> uses;
  };
  using Pool = std::multimap<std::size_t, std::byte*>;  // by size

  void cache_locked(std::byte* data);
  void collect_locked();
  void release_locked();
  [[nodiscard]] std::size_t room_locked() const;

  const std::size_t capacity_;
  mutable std::mutex mutex_;  // guards all below
  std::size_t limit_;
  std::size_t beside_ = 0;
  std::map<std::byte*, Block> blocks_;
  std::map<std::uint64_t, Pool> cached_;  // by stream
  std::list<Held> held_;
  Figures figures_;
  std::vector<Tracker> trackers_;
  Overwrite overwrite_at_ = Overwrite::kFree;
};

}  // namespace castor::simulated
