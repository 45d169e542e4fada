#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "core/chunk_layout.h"
#include "core/mutex.h"
#include "store/address_follower.h"

namespace castor {

/// Torch storages of gradients, one for each, in chunks that do not always have memory of their
/// own: on NVMe, or sharded over ranks. The storages point nowhere until the chunk's gradients are
/// brought into memory.
///
/// Owned by the session. Thread-safe.
class GradientStorages final : public AddressFollower {
 public:
  /// Makes the storages of the chunks that `chunks` marks, on `device`. `layout` outlives this.
  GradientStorages(const ChunkLayout& layout, const std::vector<bool>& chunks, c10::Device device);

  /// Returns the storage of the parameter's gradient; an empty one where its chunk has none here.
  [[nodiscard]] const c10::Storage& storage(ParamId param) const { return storages_[index(param)]; }
  /// Puts a new storage in the place of the gradient's, with the same address. Returns the old one,
  /// which points there as well.
  c10::Storage renew(ParamId param);
  void point_at(ChunkId chunk, std::byte* address) const noexcept override;
  void for_each(ChunkId chunk, const std::function<void(const c10::Storage&)>& use) const;

 private:
  const ChunkLayout& layout_;
  mutable Mutex mutex_;
  std::vector<c10::Storage> storages_;  // per parameter; written under the mutex
};

}  // namespace castor
