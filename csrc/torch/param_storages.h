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

/// Torch storages over the bytes that each parameter has in one payload of its chunk: its values,
/// or its gradient. They point nowhere until somebody says where the payload is.
///
/// Owned by the session. Thread-safe.
class ParamStorages final : public AddressFollower {
 public:
  /// Makes the storages of the chunks that `chunks` marks, on `device`. `layout` outlives this.
  ParamStorages(const ChunkLayout& layout, const std::vector<bool>& chunks, c10::Device device);

  /// Returns the parameter's storage; an empty one where its chunk has none here.
  [[nodiscard]] const c10::Storage& storage(ParamId param) const { return storages_[index(param)]; }
  /// Puts `storage` in the place of the parameter's, with the same address. Returns the old one,
  /// which points there as well.
  c10::Storage replace(ParamId param, c10::Storage storage);
  /// Same, with a new storage.
  c10::Storage renew(ParamId param);
  void point_at(ChunkId chunk, std::byte* address) const noexcept override;
  /// Calls `use` for the storages of the chunk's parameters, in no particular order.
  void for_each(ChunkId chunk, const std::function<void(const c10::Storage&)>& use) const;
  /// Returns the parameter's first byte in the payload.
  [[nodiscard]] std::size_t byte_offset(ParamId param) const noexcept {
    return layout_.place(param).offset * size_of(layout_.param(param).type);
  }

 private:
  const ChunkLayout& layout_;
  mutable Mutex mutex_;  // a thread that moves a chunk points its storages; any thread may
  std::vector<c10::Storage> storages_;  // per parameter; written under the mutex
};

}  // namespace castor
