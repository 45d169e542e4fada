#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "store/address_follower.h"

namespace castor::testing {

/// Follower that remembers where each chunk's payload is, and how often it was told. Thread-safe.
class RecordingFollower final : public AddressFollower {
 public:
  void point_at(ChunkId chunk, std::byte* address) const noexcept override {
    const std::lock_guard lock(mutex_);
    Told& told = chunks_[chunk];
    told.address = address;
    ++told.count;
  }
  /// Returns where the payload is; nullptr: nowhere.
  [[nodiscard]] std::byte* address(ChunkId chunk) const {
    const std::lock_guard lock(mutex_);
    return chunks_[chunk].address;
  }
  [[nodiscard]] std::size_t count(ChunkId chunk) const {
    const std::lock_guard lock(mutex_);
    return chunks_[chunk].count;
  }

 private:
  struct Told {
    std::byte* address = nullptr;
    std::size_t count = 0;
  };
  mutable std::mutex mutex_;
  mutable std::map<ChunkId, Told> chunks_;
};

}  // namespace castor::testing
