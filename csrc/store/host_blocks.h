#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <utility>

#include "core/memory_tier.h"
#include "core/mutex.h"

namespace castor {

/// Host buffers of one size after the other, such as those of offloaded activations. A buffer that
/// is given back is kept for the next one of its size: the next step needs the same sizes. Buffers
/// that are kept take no more bytes than were in use at once so far, since batches of other lengths
/// need others. Thread-safe; its mutex is a leaf.
class HostBlocks {
 public:
  /// `host` outlives this. `remedy`: what OutOfMemory tells the user to change.
  HostBlocks(MemoryTier& host, std::string remedy) : host_(host), remedy_(std::move(remedy)) {}

  /// Returns a buffer of `bytes`. Gives kept buffers of other sizes back before the host counts as
  /// full. Throws OutOfMemory.
  [[nodiscard]] Block take(std::size_t bytes);
  /// Takes back a buffer of take().
  void give_back(Block block) noexcept;
  /// Returns the bytes of buffers that are kept.
  [[nodiscard]] std::size_t kept_bytes() const;

 private:
  [[nodiscard]] Block take_kept(std::size_t bytes);

  MemoryTier& host_;
  const std::string remedy_;
  mutable Mutex mutex_;
  std::deque<Block> kept_ CASTOR_GUARDED_BY(mutex_);  // the last that came back at the end
  std::size_t kept_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t used_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t most_used_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace castor
