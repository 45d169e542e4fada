#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "core/compute_stream.h"
#include "core/mutex.h"

namespace castor::cuda {

/// The streams of castor's blocks of a device: the one whose pool of torch's allocator a block is
/// of, and those that were told to use it as well (Tensor.record_stream). The allocator reuses a
/// block in the order of its pool's stream, so whatever else used it has to be before that.
///
/// Owned by a CachingArena. Thread-safe; its mutex is the last one taken, but for CUDA's own.
class BlockStreams {
 public:
  explicit BlockStreams(int device) : device_(device) {}

  /// The block was taken from the pool of `stream`.
  void add(const std::byte* data, std::size_t bytes, StreamId stream);
  /// `stream` uses the block that `data` lies in. False if there is none.
  [[nodiscard]] bool record(const std::byte* data, StreamId stream);
  /// Makes `stream` wait for the streams recorded for the block, which are forgotten. Throws
  /// CudaError; those waited for stay recorded then.
  void await_users(const std::byte* data, StreamId stream);
  /// The block is about to go back: makes its pool's stream wait for `stream` and for those
  /// recorded. Where CUDA refuses that the host waits for the device.
  void remove(const std::byte* data, StreamId stream) noexcept;

 private:
  struct Block {
    std::size_t bytes = 0;
    StreamId pool{};
    std::vector<StreamId> users;  // recorded
  };

  const int device_;
  Mutex mutex_;
  std::map<const std::byte*, Block> blocks_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor::cuda
