#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/copy_engine.h"
#include "core/memory_tier.h"
#include "core/mutex.h"

namespace castor {

/// Gradients of streamed chunks that gather in memory of the device until the ranks have reduced
/// them there, so that a rank sends no more to the host than its shard of the mean.
///
/// A few buffers, each as large as the largest such chunk, are taken at the start. A chunk has one
/// from its first gradient of a pass until it is reduced, or until somebody wants its gradients in
/// host storage: then what has come so far is moved there, and what comes later goes there
/// directly.
///
/// Owned by RankGradients. Thread-safe: the thread that computes adds gradients, another one
/// reduces them, and any thread may read p.grad, which moves them to the host. Destruction requires
/// that nothing on the device uses the buffers.
class DeviceGradients {
 public:
  /// Number of buffers, and the size of each.
  struct Buffers {
    std::size_t count = 0;
    std::size_t bytes = 0;

    [[nodiscard]] std::size_t total_bytes() const { return count * bytes; }
  };
  /// Returns the buffers for the chunks that `gathers` marks: at most three. One fills while the
  /// last one is being reduced; the third is for a chunk whose gradients do not come one after the
  /// other.
  [[nodiscard]] static Buffers buffers(const ChunkLayout& layout, const std::vector<bool>& gathers);
  /// Returns the buffers where every trainable chunk gathers: none is on the device for good.
  [[nodiscard]] static Buffers most_buffers(const ChunkLayout& layout);

  /// Takes buffers() from `device`. `copies` moves gradients to the host: none of its copies waits
  /// for an update. Throws OutOfMemory. `layout` and `device` outlive this.
  DeviceGradients(const ChunkLayout& layout, const std::vector<bool>& gathers, MemoryTier& device,
                  std::shared_ptr<CopyEngine> copies);
  DeviceGradients(const DeviceGradients&) = delete;
  DeviceGradients& operator=(const DeviceGradients&) = delete;

  /// Gives the chunk a buffer, whose contents are undefined. Returns false where none is free.
  [[nodiscard]] bool begin(ChunkId chunk);
  [[nodiscard]] bool gathering(ChunkId chunk) const;

  /// Function that gives the device's stream the kernels which write a parameter's gradient into
  /// the buffer of its chunk; `first`: nothing has been written there yet.
  using Write = std::function<void(std::span<std::byte> buffer, bool first)>;
  /// Adds a gradient to those of its chunk. Returns false, and does not call `write`, where the
  /// chunk does not gather, or does not any more.
  [[nodiscard]] bool add(ParamId param, const Write& write);
  /// Returns whether a gradient of each of the chunk's parameters is in its buffer.
  [[nodiscard]] bool complete(ChunkId chunk) const;

  /// Returns the chunk's gradients, which nobody moves to the host before release(); empty where
  /// the chunk does not gather.
  [[nodiscard]] std::span<const std::byte> values(ChunkId chunk) const;
  /// Takes the buffer back when the ranks have reduced the chunk: nothing on the device uses the
  /// buffer any more. `bytes` of the mean have come to the host.
  void release(ChunkId chunk, std::size_t bytes);

  /// Function that returns the host memory for the chunk's gradients; may throw OutOfMemory.
  using Target = std::function<std::byte*()>;
  /// Copies what has gathered of the chunk to the place that `target` returns, and takes the buffer
  /// back. No effect where the chunk does not gather. Returns when the copies are over.
  void move_to_host(ChunkId chunk, const Target& target);

  /// Returns the bytes that came to the host: of means, and by move_to_host().
  [[nodiscard]] std::uint64_t bytes_moved() const noexcept { return bytes_moved_; }

 private:
  struct Buffer {
    Block memory;
    bool taken = false;
    ChunkId chunk{};           // of those below
    std::vector<bool> params;  // in the chunk's order: which have come
    bool written = false;
  };
  [[nodiscard]] const Buffer* of(ChunkId chunk) const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] Buffer* of(ChunkId chunk) CASTOR_REQUIRES(mutex_);

  const ChunkLayout& layout_;
  const MemoryTier& device_;
  const std::shared_ptr<CopyEngine> copies_;
  mutable Mutex mutex_;  // held while gradients are moved to the host
  std::vector<Buffer> buffers_ CASTOR_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> bytes_moved_ = 0;
};

}  // namespace castor
