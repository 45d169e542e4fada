#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "core/compute_stream.h"
#include "core/mutex.h"

namespace castor::cuda {

/// Streams of castor's blocks on a device: the one from whose pool of torch's allocator a block was
/// taken, and those that were named as its users as well (Tensor.record_stream). The allocator
/// reuses a block in the order of its pool's stream, so every other use has to come before that.
///
/// Shared by the CachingArenas of the device. Thread-safe; its mutex is the last one taken, but for
/// CUDA's own.
class BlockStreams {
 public:
  explicit BlockStreams(int device) : device_(device) {}

  /// Records that the block was taken from the pool of `stream`.
  void add(const std::byte* data, std::size_t bytes, StreamId stream);
  /// Records that `stream` uses the block that `data` lies in. Returns false if there is none.
  [[nodiscard]] bool record(const std::byte* data, StreamId stream);
  /// Makes `stream` wait for the streams recorded for the block, and forgets them. Throws
  /// CudaError; the streams stay recorded then.
  void await_users(const std::byte* data, StreamId stream);
  /// Removes a block that is about to go back: makes its pool's stream wait for `stream` and for
  /// the streams recorded. Where CUDA refuses that, the host waits for the device.
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
