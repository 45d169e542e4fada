#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "core/chunk_layout.h"
#include "core/mutex.h"

namespace castor {

/// One torch storage per gradient whose chunk has no memory of its own all the time: on NVMe, or in
/// parts on several ranks. They point nowhere until the chunk's gradients are brought into memory.
///
/// Owned by whoever brings them. Thread-safe.
class GradientStorages {
 public:
  /// Makes those of the chunks that `chunks` names, of `device`. `layout` outlives this.
  GradientStorages(const ChunkLayout& layout, const std::vector<bool>& chunks, c10::Device device);

  /// No storage where the chunk has none.
  [[nodiscard]] const c10::Storage& storage(ParamId param) const { return storages_[index(param)]; }
  /// A new storage takes the place of the gradient's, where that points. Returns the old one, which
  /// points there as well.
  c10::Storage renew(ParamId param);
  /// `address` is the chunk's, or nullptr for nowhere.
  void point_at(ChunkId chunk, std::byte* address) const noexcept;
  void for_each(ChunkId chunk, const std::function<void(const c10::Storage&)>& use) const;

 private:
  const ChunkLayout& layout_;
  mutable Mutex mutex_;
  std::vector<c10::Storage> storages_;  // per parameter; written under the mutex
};

}  // namespace castor
