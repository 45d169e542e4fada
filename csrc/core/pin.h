#pragma once

#include "core/ids.h"

namespace castor {

class ChunkManager;

/// Keeps a chunk on the device while it lives. Move-only; made by ChunkManager::pin.
class Pin {
 public:
  Pin() = default;
  Pin(Pin&& other) noexcept;
  Pin& operator=(Pin&& other) noexcept;
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  ~Pin() { release(); }
  void release() noexcept;

 private:
  friend class ChunkManager;
  Pin(ChunkManager& manager, ChunkId chunk) noexcept : manager_(&manager), chunk_(chunk) {}
  ChunkManager* manager_ = nullptr;
  ChunkId chunk_{};
};

}  // namespace castor
