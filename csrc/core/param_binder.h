#pragma once

#include <cstddef>
#include <cstring>
#include <span>

#include "core/ids.h"

namespace castor {

/// Seam that points the parameters of a chunk at memory: torch storages in csrc/torch, fakes in
/// tests.
class ParamBinder {
 public:
  virtual ~ParamBinder() = default;
  virtual void bind(ChunkId chunk, std::byte* address) noexcept = 0;
  /// Remembers how often the parameters were written, as far as the binder sees it.
  virtual void snapshot(ChunkId chunk) noexcept = 0;
  /// Returns whether somebody has written to one of the parameters since the snapshot.
  [[nodiscard]] virtual bool written_since_snapshot(ChunkId chunk) const noexcept = 0;
  /// Called before the chunk's host storage `host` is overwritten with what user code made of its
  /// `slot`. Both have the payload's bytes. If this throws, the chunk stays where it is.
  virtual void before_write_back(ChunkId chunk, const std::byte* host, const std::byte* slot) = 0;
  /// Copies within the device, in order with the computing. The default is for a device that the
  /// host can address.
  virtual void copy_on_device(std::span<const std::byte> source, std::byte* target) {
    std::memcpy(target, source.data(), source.size());
  }
};

}  // namespace castor
