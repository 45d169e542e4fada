#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/chunk_layout.h"
#include "core/memory_tier.h"
#include "core/mutex.h"
#include "dist/weight_parts.h"
#include "torch/gradient_storages.h"

namespace castor {

/// Gradients of which each rank keeps its part of the mean (ZeRO-2, Rajbhandari et al. 2020,
/// section 5.2, over chunks). What a rank has of a chunk besides is a copy of all of it, which the
/// host pays for: from its first gradient of a pass until all ranks have theirs, while an operator
/// reads p.grad, and after one has written it.
///
/// Outside of operators the chunk's storage points nowhere, and torch tells whoever asks for the
/// address: nobody can keep one that will be another chunk's. Who reads asks the other ranks for
/// their parts of the mean, whatever they do (WeightParts). Means change in reduce(), which all
/// ranks call alike and which waits for this rank's readers.
///
/// Owned by the session. Thread-safe; that a copy is not dropped under who uses its address is the
/// callers' agreement (TensorGate).
class GradientParts {
 public:
  /// What a copy that has to be made begins with.
  enum class Contents : std::uint8_t { kZeros, kMean };
  enum class Access : std::uint8_t { kRead, kWrite };

  /// `parts` has those of weights by chunk, then those of gradients by chunk, and knows the ranks;
  /// copies are of `host`. `device`: of the tensors. All outlive this.
  GradientParts(const ChunkLayout& layout, WeightParts& parts, MemoryTier& host,
                c10::Device device);
  ~GradientParts();
  GradientParts(const GradientParts&) = delete;
  GradientParts& operator=(const GradientParts&) = delete;

  /// Whether the chunk's gradients are in parts; else they are whole on every rank, or there are
  /// none.
  [[nodiscard]] bool cut(ChunkId chunk) const noexcept { return parts_.cut(of(chunk)); }
  /// The storage of a gradient of a cut chunk.
  [[nodiscard]] const c10::Storage& storage(ParamId param) const {
    return storages_.storage(param);
  }
  /// See GradientStorages::renew.
  c10::Storage renew_storage(ParamId param) { return storages_.renew(param); }
  /// From now on their addresses are told only in visits. Once their tensors are made.
  void forbid_addresses();

  /// Makes a copy, which stays, unless there is one. Throws OutOfMemory; Error where a rank is
  /// gone.
  void take_copy(ChunkId chunk, Contents contents);
  /// Forgets it, and what was written into it. No tensor is left over the chunk's gradients.
  void drop_copy(ChunkId chunk);
  /// Whether there is one that stays.
  [[nodiscard]] bool has_copy(ChunkId chunk) const;
  /// The address of all of the chunk's gradients. Requires that it has a copy.
  [[nodiscard]] std::byte* copy(ChunkId chunk) const;
  /// This rank's part, as a tensor over the gradients shows it: of the copy that was written, or of
  /// the mean.
  [[nodiscard]] std::byte* part(ChunkId chunk) const;

  /// The chunk's gradients have an address until the visit ends. As take_copy, but a copy that was
  /// only read goes when another chunk is read.
  [[nodiscard]] std::shared_ptr<void> visit(ChunkId chunk, Access access);

  /// Gets the copy, and where this rank's part of the mean belongs.
  using Reduce = std::function<void(std::span<const std::byte> copy, std::span<std::byte> part)>;
  /// Makes the copies of all ranks parts of their mean, and forgets this one. Requires a copy.
  void reduce(ChunkId chunk, const Reduce& work);

  [[nodiscard]] std::size_t part_bytes() const noexcept { return part_bytes_; }
  /// Of copies, now and at most.
  [[nodiscard]] std::size_t copy_bytes() const;
  [[nodiscard]] std::size_t peak_copy_bytes() const;

 private:
  class Visit;
  struct Chunk {
    Block copy;
    std::size_t num_visits = 0;
    bool written = false;  // the copy: it is not the mean, or will not be
    bool busy = false;     // somebody makes the copy, or the mean of it
    bool reduced = false;  // there is a mean
  };
  // Of `parts`.
  [[nodiscard]] ChunkId of(ChunkId chunk) const noexcept {
    return ChunkId{static_cast<std::uint32_t>(layout_.chunks().size() + index(chunk))};
  }
  void bring(ChunkId chunk, Contents contents, Access access, std::size_t num_visits);
  [[nodiscard]] Block make(ChunkId chunk, Contents contents);
  void drop(ChunkId chunk) CASTOR_REQUIRES(mutex_);
  void drop_read() CASTOR_REQUIRES(mutex_);
  void end_visit(ChunkId chunk) noexcept;

  const ChunkLayout& layout_;
  WeightParts& parts_;
  MemoryTier& host_;
  GradientStorages storages_;
  [[nodiscard]] std::vector<bool> cut_chunks() const;

  std::size_t part_bytes_ = 0;
  mutable Mutex mutex_;
  std::condition_variable changed_;  // a chunk is not busy or visited any more
  std::vector<Chunk> chunks_ CASTOR_GUARDED_BY(mutex_);
  std::optional<ChunkId> read_ CASTOR_GUARDED_BY(mutex_);  // its copy is left for the next reader
  std::size_t copy_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t peak_copy_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace castor
